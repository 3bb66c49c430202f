"""The laws of levels, for every line of `LEVELS`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laws.oracle import level_values, nearest_codes
from ongrid.grid import LEVELS, AbstractLevels

patient = settings(deadline=None)  # a busy machine is not an error
each = pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)


def codes_of(levels: AbstractLevels) -> Tensor:
    """The codes that stand for a level."""
    codes = torch.arange(2**levels.bits, dtype=torch.int32).to(torch.uint8)
    return codes[~levels.value(codes).isnan()]


def values_of(levels: AbstractLevels) -> Tensor:
    """The different levels in order, float32."""
    return levels.value(codes_of(levels)).unique()


def middles(levels: AbstractLevels) -> Tensor:
    """Halfway between neighbouring levels, float64."""
    v = values_of(levels).double()
    return v[:-1] + (v[1:] - v[:-1]) / 2


def midpoints(levels: AbstractLevels) -> Tensor:
    """The middles of neighbouring levels that are float32 numbers: exact ties."""
    exact = middles(levels)
    return exact[exact.float().double() == exact].float()


def trial_numbers(levels: AbstractLevels) -> Tensor:
    """Levels, ties, their float32 neighbours, and numbers of every size; sorted, finite."""
    generator = torch.Generator().manual_seed(0)
    points = torch.cat([values_of(levels), middles(levels).float()])
    around = [
        torch.nextafter(points, torch.full_like(points, end)) for end in (math.inf, -math.inf)
    ]
    within = torch.rand(2000, generator=generator) * (levels.hi - levels.lo) * 1.2 + levels.lo * 1.1
    exponents = torch.rand(2000, generator=generator, dtype=torch.float64) * 250 - 125
    sizes = torch.randn(2000, generator=generator, dtype=torch.float64).sign() * 2.0**exponents
    zeros = torch.tensor([0.0, -0.0])
    return torch.cat([points, *around, within, sizes.float(), zeros]).sort().values


def distance_to_nearest(levels: AbstractLevels, x: Tensor) -> Tensor:
    """By brute force, float64."""
    v = values_of(levels).double()
    return (x.double()[:, None] - v).abs().amin(1)


@each
def test_code_and_value_invert_each_other(levels: AbstractLevels):
    codes = codes_of(levels)
    assert torch.equal(levels.value(levels.code(levels.value(codes))), levels.value(codes))
    written = levels.code(values_of(levels))
    assert torch.equal(levels.code(levels.value(written)), written)
    assert len(written.unique()) == len(values_of(levels))


@each
def test_values_and_codes_are_those_of_the_oracle(levels: AbstractLevels):
    values = level_values(levels.name)
    codes = torch.arange(2**levels.bits, dtype=torch.int32).to(torch.uint8)
    assert np.array_equal(levels.value(codes).numpy(), values.astype(np.float32), equal_nan=True)
    x = trial_numbers(levels)
    found = levels.code(levels.nearest(x))
    assert np.array_equal(found.numpy(), nearest_codes(values, x.numpy()))


@each
def test_value_of_code_of_nearest_is_nearest(levels: AbstractLevels):
    near = levels.nearest(trial_numbers(levels))
    codes = levels.code(near)
    assert codes.dtype == torch.uint8 and near.dtype == torch.float32
    assert int(codes.max()) < 2**levels.bits
    assert torch.equal(levels.value(codes), near)


@each
def test_nearest_is_idempotent_and_monotone(levels: AbstractLevels):
    near = levels.nearest(trial_numbers(levels))
    assert torch.equal(levels.nearest(near), near)
    assert bool((near[1:] >= near[:-1]).all())


@each
def test_nearest_is_the_nearest(levels: AbstractLevels):
    x = trial_numbers(levels)
    assert torch.equal(
        (x.double() - levels.nearest(x).double()).abs(), distance_to_nearest(levels, x)
    )


@each
def test_ties_go_to_the_even_code(levels: AbstractLevels):
    ties = midpoints(levels)
    assert len(ties) or levels.name == "nf4"  # whose middles need more than 24 bits, mostly
    assert bool((levels.code(levels.nearest(ties)) % 2 == 0).all())
    for end in (math.inf, -math.inf):  # a hair to either side is no tie
        beside = torch.nextafter(ties, torch.full_like(ties, end))
        near, v = levels.nearest(beside), values_of(levels)
        expected = v[(beside.double()[:, None] - v.double()).abs().argmin(1)]
        assert torch.equal(near, expected)


@each
def test_saturates_and_never_wraps(levels: AbstractLevels):
    big = [math.inf, 3.4e38, 1e38 if levels.hi < 1e37 else math.inf, 2 * levels.hi, levels.hi]
    x = torch.tensor(big)
    assert torch.equal(levels.nearest(x), torch.full_like(x, levels.hi))
    low = torch.tensor([-math.inf, -3.4e38, -1e38, levels.lo - abs(levels.lo) - 1, levels.lo])
    assert torch.equal(levels.nearest(low), torch.full_like(low, levels.lo))


@each
def test_ends_are_the_ends(levels: AbstractLevels):
    v = values_of(levels)
    assert (levels.lo, levels.hi) == (float(v.min()), float(v.max()))
    assert levels.tiny == float(v[v > 0].min())
    assert levels.has_zero == bool((v == 0).any())


@each
def test_unclamped_ends_half_a_step_outside(levels: AbstractLevels):
    v = values_of(levels).double()
    x = trial_numbers(levels)
    below, above = v[0] - (v[1] - v[0]) / 2, v[-1] + (v[-1] - v[-2]) / 2
    ends = (x.double() == below) | (x.double() == above)  # a tie belongs to either side
    inside = (x.double() >= below) & (x.double() <= above)
    assert torch.equal(levels.unclamped(x)[~ends], inside[~ends])
    assert bool(levels.unclamped(values_of(levels)).all())
    assert not bool(levels.unclamped(torch.tensor([math.inf, -math.inf])).any())


@each
def test_zeros_have_one_code(levels: AbstractLevels):
    x = torch.tensor([0.0, -0.0])
    codes = levels.code(levels.nearest(x))
    assert int(codes[0]) == int(codes[1])


@each
def test_shape_layout_and_dtype_do_not_matter(levels: AbstractLevels):
    x = torch.tensor([[-3.0, 0.5, 2.0], [0.25, 100.0, -0.75]]) * levels.tiny
    near = levels.nearest(x)
    assert torch.equal(levels.nearest(x.T).T, near)
    assert torch.equal(levels.nearest(x[0, 1]), near[0, 1])
    assert torch.equal(levels.nearest(x.bfloat16()), levels.nearest(x.bfloat16().float()))
    assert torch.equal(levels.code(near.T).T, levels.code(near))


@patient
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
@each
def test_any_float(levels: AbstractLevels, x: float):
    t = torch.tensor([x])
    near = levels.nearest(t)
    assert torch.equal((t.double() - near.double()).abs(), distance_to_nearest(levels, t))
    assert torch.equal(levels.nearest(near), near)
    assert torch.equal(levels.value(levels.code(near)), near)


@patient
@given(a=st.floats(width=32, allow_nan=False), b=st.floats(width=32, allow_nan=False))
@each
def test_any_two_floats_keep_their_order(levels: AbstractLevels, a: float, b: float):
    low, high = levels.nearest(torch.tensor([min(a, b), max(a, b)]))
    assert low <= high
