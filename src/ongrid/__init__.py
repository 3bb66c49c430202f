"""ongrid: the model you serve is, bit for bit, the model you calibrated and trained."""

from ongrid._version import VERSION
from ongrid.adopt import adopt
from ongrid.calibrate.algorithm import ALGORITHMS, AbstractAlgorithm
from ongrid.calibrate.block_ap import BlockAp
from ongrid.calibrate.gptq import Gptq
from ongrid.calibrate.ranges import Max, Mse, Rtn
from ongrid.calibrate.signround import SignRound
from ongrid.errors import (
    CalibrationError,
    ConfigError,
    GridError,
    MergeMismatch,
    NonFiniteError,
    OngridError,
    PackingError,
    Problems,
    RecipeError,
    ResumeError,
    StoreError,
    StructureError,
    TrainingError,
    VerifyError,
)
from ongrid.finetune import load, merge
from ongrid.grid import Grid, QTensor
from ongrid.quantize import Progress, plan, quantize
from ongrid.recipe import Plan, Recipe, Rule, presets
from ongrid.store.artifact import Artifact
from ongrid.tune.merge import MergeProof
from ongrid.tune.method import METHODS, AbstractMethod, Peqa, attach, parameter_groups
from ongrid.tune.qalora import QaLora
from ongrid.tune.state import load_state, save_state

__version__ = VERSION

__all__ = [
    "ALGORITHMS",
    "METHODS",
    "AbstractAlgorithm",
    "AbstractMethod",
    "Artifact",
    "BlockAp",
    "CalibrationError",
    "ConfigError",
    "Gptq",
    "Grid",
    "GridError",
    "Max",
    "MergeMismatch",
    "MergeProof",
    "Mse",
    "NonFiniteError",
    "OngridError",
    "PackingError",
    "Peqa",
    "Plan",
    "Problems",
    "Progress",
    "QTensor",
    "QaLora",
    "Recipe",
    "RecipeError",
    "ResumeError",
    "Rtn",
    "Rule",
    "SignRound",
    "StoreError",
    "StructureError",
    "TrainingError",
    "VerifyError",
    "adopt",
    "attach",
    "load",
    "load_state",
    "merge",
    "parameter_groups",
    "plan",
    "presets",
    "quantize",
    "save_state",
]
