"""Modules that hold grids. Knows no files and no model library."""

from ongrid.nn.activation import ActivationQuantizer
from ongrid.nn.linear import (
    INPUT,
    OUTPUT,
    WEIGHT,
    LinearSite,
    OtherWeight,
    QuantizerSpec,
    QuantLinear,
    bypassed,
    find_linears,
    find_others,
    freeze,
    group_by_linear,
    held,
    insert,
    insert_empty,
    place,
    quant_linears,
)
from ongrid.nn.mode import eval_mode
from ongrid.nn.stack import Stack, find_stack
from ongrid.nn.weight import AbstractWeight, CodedWeight, LatentWeight

__all__ = [
    "INPUT",
    "OUTPUT",
    "WEIGHT",
    "AbstractWeight",
    "ActivationQuantizer",
    "CodedWeight",
    "LatentWeight",
    "LinearSite",
    "OtherWeight",
    "QuantLinear",
    "QuantizerSpec",
    "Stack",
    "bypassed",
    "eval_mode",
    "find_linears",
    "find_others",
    "find_stack",
    "freeze",
    "group_by_linear",
    "held",
    "insert",
    "insert_empty",
    "place",
    "quant_linears",
]
