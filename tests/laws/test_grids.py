"""The laws of grids, for every grid of the table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from laws import oracle
from laws.table import (
    CASES,
    DTYPES,
    GRIDS,
    INTEGER_GRIDS,
    assert_same,
    counts,
    example,
    plain,
    shape,
)
from ongrid.errors import GridError, NonFiniteError
from ongrid.grid import Grid, Int, Parts, QTensor
from ongrid.grid.grid import smallest_scale

each = pytest.mark.parametrize("name", GRIDS)
each_case = pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)


def of_blocks(t: Tensor, grid: Grid) -> Tensor:
    """A matrix as `[R C numbers]`."""
    rows, cols = grid.blocks.counts((t.shape[0], t.shape[1]))
    grouped = t.reshape(rows, t.shape[0] // rows, cols, t.shape[1] // cols)
    return grouped.transpose(1, 2).flatten(2)


@each
def test_string_comes_back(name: str):
    grid = Grid.parse(name)
    assert str(grid) == name
    again = Grid(grid.levels, grid.blocks, grid.scale, grid.zero, grid.zero_dtype)
    assert again == grid and hash(again) == hash(grid)


@each_case
def test_rounds_as_the_oracle(name: str, dtype: torch.dtype):
    grid = Grid.parse(name)
    w = example(grid, dtype)
    parts = grid.quantize(w)
    expected = oracle.quantize(grid, w.float().numpy())
    assert oracle.same(oracle.as_result(grid, parts), expected)
    for target in DTYPES:
        numbers = torch.from_numpy(oracle.store(expected.numbers, target))
        assert torch.equal(grid.decode(parts, target), numbers.to(target))


@each
def test_decodes_any_codes_as_the_oracle(name: str):
    """Also codes that rounding does not write: minus zero, and codes far from the matrix."""
    grid = Grid.parse(name)
    parts = grid.quantize(example(grid))
    torch.manual_seed(0)
    codes = torch.randint(0, 2**grid.levels.bits, parts.codes.shape).to(torch.uint8)
    codes = torch.where(grid.levels.value(codes).isnan(), parts.codes, codes)
    parts = parts._replace(codes=codes)
    numbers = torch.from_numpy(oracle.decode(grid, oracle.as_result(grid, parts)))
    assert_same(grid.decode(parts, torch.float32), numbers)


@each
def test_decode_of_encode_is_idempotent(name: str):
    grid = Grid.parse(name)
    w = example(grid)
    scale, zero = grid.fit(w)
    once = grid.decode(Parts(grid.encode(w, scale, zero), scale, zero), torch.float32)
    codes = grid.encode(once, scale, zero)
    assert torch.equal(codes, grid.encode(w, scale, zero))
    assert torch.equal(grid.decode(Parts(codes, scale, zero), torch.float32), once)


@each
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-42, 1e-40, 1e-38, 1e-30, 1e-8, 1e-4, 1.0, 100.0])
def test_scales_are_finite_and_positive(name: str, size: float):
    grid = Grid.parse(name)
    scale, _ = grid.fit(example(grid) * size)
    scales = grid.scales(scale)
    assert bool((torch.isfinite(scales) & (scales > 0)).all())


@each
def test_a_block_of_zeros_decodes_to_zeros(name: str):
    grid = Grid.parse(name)
    w = torch.zeros(shape(grid))
    found = grid.decode(grid.quantize(w), torch.float32)
    if grid.levels.has_zero:
        assert torch.equal(found, w)
    elif plain(grid):  # the smallest level times the smallest scale
        assert isinstance(grid.scale, torch.dtype)
        least = torch.full_like(w, smallest_scale(grid.scale) * grid.levels.tiny)
        assert torch.equal(found, least)


@each
@pytest.mark.parametrize("side", [1, -1])
def test_the_range_includes_zero(name: str, side: int):
    """So that a pruned weight stays zero, whatever surrounds it."""
    grid = Grid.parse(name)
    w = (example(grid).abs() + 0.5) * side
    if side < 0 and grid.zero is None and grid.levels.lo >= 0:
        with pytest.raises(GridError, match=f"{grid.levels.name} levels reach from .* up"):
            grid.fit(w)
        return
    lo, hi = grid.ranges(w)
    assert bool((lo <= 0).all()) and bool((hi >= 0).all())
    scale, zero = grid.fit(w)
    zeros = torch.zeros_like(w)
    found = grid.decode(Parts(grid.encode(zeros, scale, zero), scale, zero), torch.float32)
    if grid.zero == "shift" and plain(grid):
        # Zero is a shifted level only by chance: half a step, and what was lost of the shift.
        assert zero is not None and grid.zero_dtype is not None
        lost = zero.float().abs() * torch.finfo(grid.zero_dtype).eps
        bound = grid.scales(scale) * 0.501 + lost
        assert bool((of_blocks(found.abs(), grid).amax(2) <= bound).all())
    elif grid.zero != "shift" and grid.levels.has_zero:
        assert torch.equal(found, zeros)


@pytest.mark.parametrize(("name", "dtype"), [c for c in CASES if plain(Grid.parse(c[0]))], ids=str)
def test_numbers_move_by_half_a_step_at_most(name: str, dtype: torch.dtype):
    """Inside the range, half the distance of the neighbouring levels. Where the range was rounded
    below what it has to cover, the outermost numbers are clipped by what rounding took:

    - a scale stored with p digits may be 2**-p of itself too small: end * 2**-p steps;
    - a zero code moves the range by up to half a step;
    - a stored shift moves it by half its last digit.

    Scales are representable here: the examples have no subnormal ones. (Scales on a grid may take
    far more, which the oracle follows; a statement about them says something of their own levels.)
    """
    grid = Grid.parse(name)
    w = example(grid, dtype)
    parts = grid.quantize(w)
    assert isinstance(grid.scale, torch.dtype)
    s = grid.scales(parts.scale).double()[..., None]
    numbers = of_blocks(w.double(), grid)
    decoded = of_blocks(grid.decode(parts, torch.float32).double(), grid)
    values = grid.levels.value(torch.arange(2**grid.levels.bits).to(torch.uint8)).double()
    values = values[~values.isnan()].unique()
    moved, slack = 0.0, (values.abs().max() * torch.finfo(grid.scale).eps / 2).expand_as(s)
    if grid.zero == "code":
        assert parts.zero is not None
        values = values - values[0]
        moved = parts.zero.double()[..., None]
        slack = values[-1] * torch.finfo(grid.scale).eps / 2 + torch.full_like(s, 0.5)
    elif grid.zero == "shift":
        assert parts.zero is not None and grid.zero_dtype is not None
        b = parts.zero.double()[..., None]
        moved = -b / s
        slack = slack + (b / s).abs() * torch.finfo(grid.zero_dtype).eps / 2
    u = numbers / s + moved
    above = torch.bucketize(u, values).clamp(1, len(values) - 1)
    half = (values[above] - values[above - 1]) / 2
    clipped = (u < values[0]) | (u > values[-1])
    # Everything is computed in float32: a few of its last digits.
    bound = torch.where(clipped, slack, half) + (u - moved).abs() * 2**-21 + 2**-21
    off = (decoded - numbers).abs() / s
    assert bool((off <= bound).all()), float((off - bound).max())


@each
def test_any_slice_along_blocks_encodes_alike(name: str):
    """What lets calibration work on a few columns, or rows, at a time."""
    grid = Grid.parse(name)
    w, (rows, cols) = example(grid), counts(grid)
    scale, zero = grid.fit(w)
    s, codes = grid.scales(scale), grid.encode(w, scale, zero)
    if s.dim() == 0:
        return
    flat = Grid(grid.levels, grid.blocks, torch.float32, grid.zero, grid.zero_dtype)
    for r in range(rows):
        for c in range(cols):
            height, width = w.shape[0] // rows, w.shape[1] // cols
            place = (slice(r * height, (r + 1) * height), slice(c * width, (c + 1) * width))
            z = None if zero is None else zero[r : r + 1, c : c + 1]
            found = flat.encode(w[place], s[r : r + 1, c : c + 1], z)
            assert torch.equal(found, codes[place])


@pytest.mark.parametrize("name", [n for n in GRIDS if counts(Grid.parse(n))[1] > 1])
def test_an_order_gathers_the_group_of_each_column(name: str):
    grid = Grid.parse(name)
    w = example(grid)
    parts = grid.quantize(w)
    groups = torch.arange(w.shape[1]) // (w.shape[1] // counts(grid)[1])
    shuffled = torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(0))
    order = groups[shuffled].to(torch.int32)
    codes = grid.encode(w[:, shuffled], parts.scale, parts.zero, order)
    assert torch.equal(codes, parts.codes[:, shuffled])
    for dtype in DTYPES:
        found = grid.decode(parts._replace(codes=codes), dtype, order)
        assert_same(found, grid.decode(parts, dtype)[:, shuffled])


@each_case
def test_snap_is_decode_of_encode_in_the_same_dtype(name: str, dtype: torch.dtype):
    grid = Grid.parse(name)
    w = example(grid, dtype)
    assert_same(grid.snap(w), grid.decode(grid.quantize(w), dtype))


@each_case
def test_narrow_numbers_round_as_the_same_wide_ones(name: str, dtype: torch.dtype):
    grid = Grid.parse(name)
    w = example(grid, dtype)
    narrow, wide = QTensor.rounded(grid, w), QTensor.rounded(grid, w.float(), dtype)
    assert narrow.compare(wide).total == 0
    strided = w.T.contiguous().T
    assert QTensor.rounded(grid, strided).compare(narrow).total == 0


@each
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_refused(name: str, number: float):
    grid = Grid.parse(name)
    w = example(grid)
    w[-1, -1] = number
    w[0, 0] = number
    with pytest.raises(NonFiniteError, match=f"2 of {w.numel()} numbers are NaN or infinite"):
        grid.fit(w)


@pytest.mark.parametrize("name", INTEGER_GRIDS)
def test_integer_codes_times_scales_are_exact(name: str):
    """The exactness theorem: with fp16 and bf16 scales and no shift, float32 rounds nothing."""
    grid = Grid.parse(name)
    exact = grid.zero != "shift" and grid.scale in (torch.float16, torch.bfloat16, None)
    parts = grid.quantize(example(grid))
    assert isinstance(grid.levels, Int) and not (exact and isinstance(parts.scale, Parts))
    v = grid.levels.value(parts.codes).double()
    z = torch.zeros(()) if parts.zero is None else parts.zero.double()
    if grid.zero == "code":
        z = z + grid.levels.lo
    s = grid.scales(parts.scale).double()
    rows, cols = counts(grid)
    wide = [
        t.expand(rows, cols)
        .repeat_interleave(v.shape[0] // rows, 0)
        .repeat_interleave(v.shape[1] // cols, 1)
        for t in (s, z)
    ]
    product = v * wide[0] + wide[1] if grid.zero == "shift" else (v - wide[1]) * wide[0]
    found = grid.decode(parts, torch.float32).double()
    assert torch.equal(found, product) or not exact
    np.testing.assert_allclose(found.numpy(), product.numpy(), rtol=2**-22, atol=2**-20)
