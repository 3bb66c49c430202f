"""Hugging Face: importing this package teaches transformers to load artifacts."""

from ongrid.hf import text
from ongrid.hf.batches import Batches, batches, calibration_batches, windows
from ongrid.hf.load import load_model
from ongrid.hf.quantizer import OngridConfig, OngridQuantizer
from ongrid.hf.score import Score, score, score_all

__all__ = [
    "Batches",
    "OngridConfig",
    "OngridQuantizer",
    "Score",
    "batches",
    "calibration_batches",
    "load_model",
    "score",
    "score_all",
    "text",
    "windows",
]
