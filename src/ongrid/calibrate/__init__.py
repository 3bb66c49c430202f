"""Calibration: one decoder layer at a time, one file an algorithm."""
