"""ongrid: the model you serve is, bit for bit, the model you calibrated and trained."""

from ongrid._version import VERSION
from ongrid.calibrate.algorithm import ALGORITHMS, AbstractAlgorithm
from ongrid.calibrate.gptq import Gptq
from ongrid.calibrate.ranges import Max, Mse, Rtn
from ongrid.errors import (
    CalibrationError,
    ConfigError,
    GridError,
    NonFiniteError,
    OngridError,
    PackingError,
    Problems,
    RecipeError,
    ResumeError,
    StoreError,
    StructureError,
    VerifyError,
)
from ongrid.grid import Grid, QTensor
from ongrid.quantize import Progress, plan, quantize
from ongrid.recipe import Plan, Recipe, Rule, presets
from ongrid.store.artifact import Artifact

__version__ = VERSION

__all__ = [
    "ALGORITHMS",
    "AbstractAlgorithm",
    "Artifact",
    "CalibrationError",
    "ConfigError",
    "Gptq",
    "Grid",
    "GridError",
    "Max",
    "Mse",
    "NonFiniteError",
    "OngridError",
    "PackingError",
    "Plan",
    "Problems",
    "Progress",
    "QTensor",
    "Recipe",
    "RecipeError",
    "ResumeError",
    "Rtn",
    "Rule",
    "StoreError",
    "StructureError",
    "VerifyError",
    "plan",
    "presets",
    "quantize",
]
