"""Numbers: levels, grids, quantized matrices, packing. Knows no modules and no files."""

from ongrid.grid import ops as ops
from ongrid.grid.bits import pack, pack_words, packed_bytes, unpack, unpack_words
from ongrid.grid.grid import Blocks, Grid, Parts
from ongrid.grid.levels import LEVELS, AbstractLevels, Codebook, FloatLevels, Int
from ongrid.grid.qtensor import Difference, QTensor, expected_tensors

__all__ = [
    "LEVELS",
    "AbstractLevels",
    "Blocks",
    "Codebook",
    "Difference",
    "FloatLevels",
    "Grid",
    "Int",
    "Parts",
    "QTensor",
    "expected_tensors",
    "pack",
    "pack_words",
    "packed_bytes",
    "unpack",
    "unpack_words",
]
