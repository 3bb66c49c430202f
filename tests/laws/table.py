"""What the laws are tested on. A line in `LEVELS`, in a recipe or in `FORMS` adds its tests.

Tests take `GRIDS`, the names; `example` gives the smallest matrix that shows what a grid can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from ongrid.calibrate.signround import RoundedWeight
from ongrid.grid import LEVELS, Grid, Int, QTensor
from ongrid.nn import AbstractWeight, CodedWeight, LatentWeight
from ongrid.recipe import Recipe, presets
from ongrid.tune.qalora import ShiftedWeight

# Forms of scales, zeros and blocks; every set of levels is added below with fp16 scales.
FORMS = (
    # dtypes of scales
    "int2.8.sym.bf16",
    "int4.8.sym.fp32",
    "int8.8.sym.bf16",
    "int4.8.code.bf16",
    "int8.8.code.bf16",
    "int8.8.code.fp32",
    "nf4.8.sym.bf16",
    "e4m3.8.sym.bf16",
    "e2m1.8.sym.fp32",
    # dtypes of shifts
    "uint4.8.shift.bf16",
    "uint8.8.shift.fp32",
    "uint4.8.shift.fp16.fp32",
    "uint8.8.shift.bf16.fp32",
    "uint3.8.shift.fp32.fp16",
    # blocks
    "int4.tensor.code.fp32",
    "int3.channel.code.fp16",
    "int4.4x8.code.fp16",
    "uint5.2x8.shift.fp16",
    "e4m3.4x16.sym.fp32",
    "int4.1.sym.fp16",
    # no scale
    "int8.channel.sym.one",
    "e4m3.tensor.sym.one",
    # scales on a grid: MXFP4, MXFP8, Q6_K, Q4_K and beyond
    "e2m1.32.sym.[e8m0.channel.sym.one]",
    "e4m3.32.sym.[e8m0.channel.sym.one]",
    "int6.16.sym.[int8.16.sym.fp16]",
    "uint4.32.shift.[uint6.8.sym.fp16].fp16",
    "int4.8.code.[uint6.4.sym.bf16]",
    "nf4.8.sym.[e4m3.2x4.sym.fp32]",
    "int4.8.sym.[int8.4.sym.[e4m3.tensor.sym.fp32]]",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _names() -> Iterator[str]:
    for levels in LEVELS.values():
        yield f"{levels.name}.8.sym.fp16"
        if isinstance(levels, Int):
            yield f"{levels.name}.8.{'code' if levels.signed else 'shift'}.fp16"
    for preset in presets():
        for rule in Recipe.load(preset).rules:
            if rule.grid is not None:
                yield rule.grid
    yield from FORMS


GRIDS = tuple(dict.fromkeys(_names()))
# Numbers of e8m0 reach farther than fp16.
CASES = tuple(
    (name, dtype)
    for name in GRIDS
    for dtype in DTYPES
    if Grid.parse(name).levels.hi <= torch.finfo(dtype).max
)
INTEGER_GRIDS = tuple(name for name in GRIDS if isinstance(Grid.parse(name).levels, Int))


def plain(grid: Grid) -> bool:
    """Whether scales are stored in a dtype, and not on a grid, nor left out."""
    return isinstance(grid.scale, torch.dtype)


def counts(grid: Grid) -> tuple[int, int]:
    """Blocks of an example along rows and columns."""
    rows, cols = shape(grid.scale) if isinstance(grid.scale, Grid) else (4, 2)
    return 1 if grid.blocks.rows == -1 else rows, 1 if grid.blocks.cols == -1 else cols


def shape(grid: Grid) -> tuple[int, int]:
    """A small shape with several blocks along each axis that has blocks."""
    blocks = zip(counts(grid), (grid.blocks.rows, grid.blocks.cols), (5, 37), strict=True)
    rows, cols = (whole if block == -1 else count * block for count, block, whole in blocks)
    return rows, cols


@cache
def _noise(rows: int, cols: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator)


def example(grid: Grid, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Numbers that the grid can hold: noise, with a row of zeros, a small one and an outlier."""
    rows, cols = shape(grid)
    w = _noise(rows, cols, seed).clone()
    w[0] = 0
    if rows > 3:
        w[1] *= 1e-3
        w[2, 0] *= 50
    if grid.scale is None:
        w *= grid.levels.hi / 3
    if grid.levels.lo >= 0 and grid.zero is None:
        w = w.abs()
    return w.to(dtype)


def latent(grid: Grid, dtype: torch.dtype) -> AbstractWeight:
    return LatentWeight(grid, example(grid, dtype))


def coded(grid: Grid, dtype: torch.dtype) -> AbstractWeight:
    return CodedWeight(QTensor.rounded(grid, example(grid, dtype)), dtype)


def coded_trained(grid: Grid, dtype: torch.dtype) -> AbstractWeight:
    q = QTensor.rounded(grid, example(grid, dtype))
    return CodedWeight(q, dtype, train=("scale", "zero") if plain(grid) else ())


def coded_ordered(grid: Grid, dtype: torch.dtype) -> AbstractWeight:
    """As `coded_trained`, with the columns of its groups mixed where there are several groups."""
    q, groups = QTensor.rounded(grid, example(grid, dtype)), counts(grid)[1]
    generator = torch.Generator().manual_seed(0)
    order = (torch.arange(q.shape[1]) % groups)[torch.randperm(q.shape[1], generator=generator)]
    q = replace(q, order=order.to(torch.int32)) if groups > 1 else q
    return CodedWeight(q, dtype, train=("scale", "zero") if plain(grid) else ())


def shifted(grid: Grid, dtype: torch.dtype) -> AbstractWeight:
    """Where there are zeros to be moved, with an adapter that moves them; else as `coded`."""
    if grid.zero is None:
        return coded(grid, dtype)
    train = ("scale",) if plain(grid) else ()
    q = QTensor.rounded(grid, example(grid, dtype))
    weight = ShiftedWeight(q, dtype, rank=3, factor=0.7, dropout=0.5, train=train)
    rows, cols = grid.blocks.counts(q.shape)
    with torch.no_grad():
        weight.a.copy_(_noise(3, cols, 1))
        weight.b.copy_(_noise(rows, 3, 2))
    return weight.eval()


def rounded(grid: Grid, dtype: torch.dtype) -> AbstractWeight:
    """Every offset and share somewhere within its bounds."""
    weight = RoundedWeight(LatentWeight(grid, example(grid, dtype)))
    with torch.no_grad():
        weight.offset.copy_(_noise(*shape(grid), 3).clamp(-0.5, 0.5))
        for seed, share in ((4, weight.up), (5, weight.down)):
            if share is not None:
                share.copy_(1 - 0.2 * _noise(*share.shape, seed).abs().clamp(max=2))
    return weight


WEIGHTS: dict[str, Callable[[Grid, torch.dtype], AbstractWeight]] = {
    "latent": latent,
    "coded": coded,
    "coded_trained": coded_trained,
    "coded_ordered": coded_ordered,
    "shifted": shifted,
    "rounded": rounded,
}


def disturb(weight: nn.Module, seed: int = 0) -> None:
    """Moves all parameters to where no training should: scales below 0, zeros far outside."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in weight.named_parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            if name.endswith("zero"):
                p += noise * torch.where(noise > 0, 3, 1e9)
            else:
                p *= 1 + 2 * noise  # a third of the numbers change their sign


def bits(t: Tensor) -> Tensor:
    """The bit patterns of a tensor: equal only if the signs of zeros and NaNs are equal too."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(kinds[t.itemsize])


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    different = int((bits(found) != bits(expected)).sum())
    assert not different, f"{different} of {found.numel()} numbers differ"
