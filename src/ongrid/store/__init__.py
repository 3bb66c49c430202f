"""Disk: safetensors and JSON, written whole or not at all, checked when read."""
