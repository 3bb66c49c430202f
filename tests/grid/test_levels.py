"""Levels against referees: torch's own 8-bit floats, tables copied from the standards, gguf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.quants import IQ4_NL
from torch import Tensor

from ongrid.errors import GridError
from ongrid.grid import LEVELS, Codebook, Int

TORCH_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

# OCP Microscaling Formats v1.0 (2023), tables 2 to 5: the numbers that are not negative, in order.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M3 = [i / 8 for i in range(16)] + [2 + i / 4 for i in range(8)] + [4 + i / 2 for i in range(8)]
E3M2 = [
    *(0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375),
    *(0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75),
    *(2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28),
]


def every_code(bits: int = 8) -> Tensor:
    return torch.arange(2**bits, dtype=torch.int32).to(torch.uint8)


def every_half() -> Tensor:
    """All finite fp16 numbers, with the float32 numbers around them."""
    half = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
    half = half[half.isfinite()]
    ends = [torch.full_like(half, end) for end in (torch.inf, -torch.inf)]
    return torch.cat([half, *(torch.nextafter(half, end) for end in ends)])


@pytest.mark.parametrize("name", TORCH_FLOATS)
def test_bit_patterns_are_torchs(name: str):
    value = LEVELS[name].value(every_code())
    expected = every_code().view(TORCH_FLOATS[name]).float()
    finite = expected.isfinite()
    assert torch.equal(value.isnan(), ~finite)  # infinities are no levels either
    # by pattern: the code of -0.0 has its sign too
    assert torch.equal(value[finite].view(torch.int32), expected[finite].view(torch.int32))


@pytest.mark.parametrize("name", TORCH_FLOATS)
def test_rounds_as_torch_casts(name: str):
    levels, dtype = LEVELS[name], TORCH_FLOATS[name]
    torch.manual_seed(0)
    x = torch.cat(
        [every_half(), torch.randn(20_000) * levels.hi, torch.randn(20_000) * levels.tiny]
    )
    cast = x.clamp(levels.lo, levels.hi).to(dtype)
    assert torch.equal(levels.nearest(x), cast.float())
    codes = torch.where(cast.float() == 0, 0, cast.view(torch.uint8))  # we write one zero
    assert torch.equal(levels.code(levels.nearest(x)), codes)


def test_e8m0_bit_patterns_are_torchs():
    expected = every_code().view(torch.float8_e8m0fnu).float()
    found = LEVELS["e8m0"].value(every_code())
    assert torch.equal(found[:-1], expected[:-1])
    assert bool(found[-1].isnan()) and bool(expected[-1].isnan())


def test_e8m0_rounds_to_the_nearest_power_ties_to_the_even_code():
    e8m0 = LEVELS["e8m0"]
    # codes: 1 is 127, 2 is 128, 4 is 129, 8 is 130
    pairs = [
        (1.4999, 1),
        (1.5, 2),
        (1.5001, 2),
        (2.9999, 2),
        (3, 2),
        (3.0001, 4),
        (6, 8),
        (0, 2**-127),
    ]
    x, expected = torch.tensor(pairs).T
    assert torch.equal(e8m0.nearest(x), expected)
    assert e8m0.code(torch.tensor([1.0, 2.0, 4.0])).tolist() == [127, 128, 129]
    assert float(e8m0.nearest(torch.tensor(-5.0))) == 2**-127


def test_e8m0_reaches_into_the_subnormals():
    e8m0 = LEVELS["e8m0"]
    x = torch.tensor([2.0**-127, 1.5 * 2.0**-127, 1.25 * 2.0**-127, 1e-45])
    assert e8m0.code(e8m0.nearest(x)).tolist() == [0, 0, 0, 0]
    assert e8m0.code(e8m0.nearest(torch.tensor([1.75 * 2.0**-127]))).tolist() == [1]


@pytest.mark.parametrize(("name", "half"), [("e2m1", E2M1), ("e2m3", E2M3), ("e3m2", E3M2)])
def test_small_floats_are_those_of_the_standard(name: str, half: list[float]):
    levels = LEVELS[name]
    positive = torch.tensor(half, dtype=torch.float32)
    expected = torch.cat([positive, -positive])
    found = levels.value(every_code(levels.bits))
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_e2m1_ties():
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4, 6.5: 6, 100.0: 6}
    x = torch.tensor(list(ties))
    assert LEVELS["e2m1"].nearest(x).tolist() == list(ties.values())
    assert LEVELS["e2m1"].nearest(-x).tolist() == [-v for v in ties.values()]


def test_e2m1_codes():
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert LEVELS["e2m1"].code(values).tolist() == list(range(8))
    assert LEVELS["e2m1"].code(-values).tolist() == [0, *range(9, 16)]  # minus zero is zero


@pytest.mark.parametrize("name", [n for n, levels in LEVELS.items() if isinstance(levels, Int)])
def test_integers_round_as_python_does(name: str):
    levels = LEVELS[name]
    assert isinstance(levels, Int)
    lo = -(2 ** (levels.bits - 1)) if levels.signed else 0
    hi = lo + 2**levels.bits - 1
    x = torch.arange(-600, 601, dtype=torch.float32) / 2  # every integer and every tie
    expected = [min(max(round(v), lo), hi) for v in x.tolist()]
    assert levels.nearest(x).tolist() == expected
    assert levels.code(levels.nearest(x)).tolist() == [v - lo for v in expected]
    assert (levels.lo, levels.hi, levels.steps) == (lo, hi, hi - lo)


def test_codes_around_a_zero_round_first_and_shift_then():
    """8.5 + 7 would round to 16; 8.5 rounds to 8, and 8 + 7 is 15."""
    uint4 = Int(4, signed=False)
    x, zero = torch.tensor([8.5, 0.5, 1.5, -7.5, -8.5, 1e30, -1e30]), torch.tensor(7.0)
    assert uint4.nearest_code(x, zero).tolist() == [15, 7, 9, 0, 0, 15, 0]


def test_nf4_is_the_quantiles_of_a_normal_distribution():
    """QLoRA's construction: two halves of 8 and 7 quantiles that share zero, scaled to 1."""
    offset, quantile = 0.9677083, torch.special.ndtri
    positive = quantile(torch.linspace(offset, 0.5, 9, dtype=torch.float64))[:-1]
    negative = -quantile(torch.linspace(offset, 0.5, 8, dtype=torch.float64))[:-1]
    values = torch.cat([positive, torch.zeros(1), negative]).sort().values
    nf4 = LEVELS["nf4"]
    assert isinstance(nf4, Codebook)
    # The published table was scaled in float32: two roundings of numbers below 1.
    assert np.abs(np.array(nf4.table) - (values / values.max()).numpy()).max() < 2 * 2**-24


def test_iq4nl_is_ggufs():
    assert LEVELS["iq4nl"].value(every_code(4)).tolist() == list(IQ4_NL.kvalues)


def test_codebooks_of_any_size_have_the_bits_they_need():
    sizes = {2: 1, 3: 2, 4: 2, 5: 3, 16: 4, 17: 5, 256: 8}
    assert {n: Codebook("c", tuple(map(float, range(n)))).bits for n in sizes} == sizes


@pytest.mark.parametrize("width", [1, 9, 0, -4])
def test_integers_of_other_widths_are_refused(width: int):
    with pytest.raises(GridError, match=f"2 to 8 bits, not {width}"):
        Int(width)
