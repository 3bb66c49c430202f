"""Levels: the finite sets of values that a scaled number may take.

This file holds the only rounding of the library. A set of levels knows three maps: from any
number to the nearest level, from a level to its code, and back. Ties go to the even code, numbers
outside saturate, and nothing ever wraps.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from ongrid.errors import GridError


class AbstractLevels(ABC):
    """A finite, ordered set of numbers with codes of `bits` bits.

    Laws: `value(code(nearest(x))) == nearest(x)`; `nearest` is idempotent and monotone, breaks
    ties to the even code, and saturates at `lo` and `hi`. Everything is computed in float32.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The first word of a grid's string."""

    @property
    @abstractmethod
    def bits(self) -> int: ...

    @property
    @abstractmethod
    def lo(self) -> float: ...

    @property
    @abstractmethod
    def hi(self) -> float: ...

    @property
    @abstractmethod
    def tiny(self) -> float:
        """The smallest positive level."""

    @property
    def has_zero(self) -> bool:
        """Whether zero is a level."""
        return float(self.nearest(torch.zeros(()))) == 0

    @abstractmethod
    def nearest(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The level nearest to each number, float32."""

    @abstractmethod
    def unclamped(self, x: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Whether x lies between the outermost levels, or no more than half a step outside."""

    @abstractmethod
    def code(self, v: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
        """The code of each level."""

    @abstractmethod
    def value(self, code: Tensor) -> Float[Tensor, "*shape"]:
        """The level of each code, float32; NaN for a code that stands for no level."""


@dataclass(frozen=True)
class Int(AbstractLevels):
    """Consecutive integers: two's complement range (`int4`: -8 to 7) or from zero (`uint4`).

    The code of v is `v - lo`, so that code order is number order.
    """

    width: int
    signed: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.width <= 8:
            raise GridError(f"integer levels have 2 to 8 bits, not {self.width}")

    @property
    def name(self) -> str:
        return f"{'int' if self.signed else 'uint'}{self.width}"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def lo(self) -> float:
        return -float(2 ** (self.width - 1)) if self.signed else 0.0

    @property
    def hi(self) -> float:
        return self.lo + 2**self.width - 1

    @property
    def tiny(self) -> float:
        return 1.0

    @property
    def steps(self) -> int:
        """The number of steps between the lowest and the highest level."""
        return 2**self.width - 1

    def nearest(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return x.float().round().clamp_(self.lo, self.hi)

    def unclamped(self, x: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        rounded = x.float().round()
        return (rounded >= self.lo) & (rounded <= self.hi)

    def nearest_code(self, x: Tensor, zero: Tensor) -> Tensor:
        """Codes of x with the code `zero` standing for 0, as float32: round first, then shift.

        Rounding `x + zero` instead gives other codes where the sum is inexact.
        """
        return x.float().round().add_(zero).clamp_(0, self.steps)

    def code(self, v: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
        return (v - self.lo).to(torch.uint8)

    def value(self, code: Tensor) -> Float[Tensor, "*shape"]:
        return code + self.lo if code.dtype == torch.float32 else code.float().add_(self.lo)


class _TableLevels(AbstractLevels):
    """Levels given by a table from codes to values; NaN marks a code without a level."""

    @property
    @abstractmethod
    def values(self) -> tuple[float, ...]:
        """The value of every code, 2**bits of them."""

    @property
    def lo(self) -> float:
        return min(v for v in self.values if not math.isnan(v))

    @property
    def hi(self) -> float:
        return max(v for v in self.values if not math.isnan(v))

    @property
    def tiny(self) -> float:
        return min(v for v in self.values if v > 0)

    def nearest(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        levels, _, thresholds = _sorted(self.values, x.device)
        return levels[torch.bucketize(x.float().contiguous(), thresholds)]

    def unclamped(self, x: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        levels, _, _ = _sorted(self.values, x.device)
        below, above = (levels[1] - levels[0]) / 2, (levels[-1] - levels[-2]) / 2
        return (x >= levels[0] - below) & (x <= levels[-1] + above)

    def code(self, v: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
        _, codes, thresholds = _sorted(self.values, v.device)
        return codes[torch.bucketize(v.float().contiguous(), thresholds)]

    def value(self, code: Tensor) -> Float[Tensor, "*shape"]:
        return _by_code(self.values, code.device)[code.long()]


@functools.lru_cache(maxsize=64)
def _by_code(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def _sorted(values: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Levels in order, their codes, and the thresholds between neighbours.

    A number belongs to the lower neighbour if it is at most the threshold. Where the midpoint is a
    float32 and the upper neighbour has the even code, the threshold lies one float below it, so
    that the tie goes up. The midpoint is taken in float64, where it is exact for all float levels.
    """
    # v + 0.0 makes the two zeros one; of two codes for a level the lower one is written.
    codes_of = {v + 0.0: c for c, v in reversed(list(enumerate(values))) if not math.isnan(v)}
    levels = torch.tensor(sorted(codes_of), dtype=torch.float64)
    codes = torch.tensor([codes_of[v] for v in sorted(codes_of)], dtype=torch.uint8)
    middles = levels[:-1] + (levels[1:] - levels[:-1]) / 2
    thresholds = middles.to(torch.float32)
    below = torch.nextafter(thresholds, torch.tensor(-math.inf))
    tie_goes_up = (thresholds.double() == middles) & (codes[1:] % 2 == 0)
    rounded_up = thresholds.double() > middles
    thresholds = torch.where(tie_goes_up | rounded_up, below, thresholds)
    return levels.float().to(device), codes.to(device), thresholds.to(device)


@dataclass(frozen=True)
class FloatLevels(_TableLevels):
    """A small floating-point format: sign, `exponent` and `mantissa` bits, subnormals, no infinity.

    Codes are the format's bit patterns. `specials` codes at the top of each half are NaN or
    infinity in the format and no levels here (OCP 8-bit floating point, 2023; OCP MX v1.0, 2023).
    """

    label: str
    exponent: int
    mantissa: int
    specials: int

    @property
    def name(self) -> str:
        return self.label

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def values(self) -> tuple[float, ...]:
        return _float_values(self.exponent, self.mantissa, self.specials)


@functools.lru_cache(maxsize=16)
def _float_values(exponent: int, mantissa: int, specials: int) -> tuple[float, ...]:
    bias = 2 ** (exponent - 1) - 1
    half: list[float] = []
    for code in range(2 ** (exponent + mantissa)):
        e, m = code >> mantissa, code & (2**mantissa - 1)
        fraction = m / 2**mantissa
        half.append((1 + fraction) * 2.0 ** (e - bias) if e else fraction * 2.0 ** (1 - bias))
    half[len(half) - specials :] = [math.nan] * specials
    return tuple(half + [-v for v in half])


@dataclass(frozen=True)
class Codebook(_TableLevels):
    """A named table of values, one for each code."""

    label: str
    table: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.label

    @property
    def bits(self) -> int:
        return (len(self.table) - 1).bit_length()

    @property
    def values(self) -> tuple[float, ...]:
        return self.table


# OCP 8-bit floating point (2023): e4m3 gives up one code a half to NaN, e5m2 a whole exponent to
# infinity and NaN. OCP MX v1.0 (2023): e2m1, e3m2 and e2m3 have numbers only; e8m0 is 2**(code-127)
# with NaN on top, no zero and no sign.
E4M3 = FloatLevels("e4m3", 4, 3, specials=1)
E5M2 = FloatLevels("e5m2", 5, 2, specials=4)
E2M1 = FloatLevels("e2m1", 2, 1, specials=0)
E3M2 = FloatLevels("e3m2", 3, 2, specials=0)
E2M3 = FloatLevels("e2m3", 2, 3, specials=0)
E8M0 = Codebook("e8m0", (*(2.0 ** (code - 127) for code in range(255)), math.nan))

# Quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, Dettmers et al., 2023, appendix E).
NF4 = Codebook(
    "nf4",
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)
# The non-linear 4-bit table of GGUF's IQ4_NL type (ggml, kvalues_iq4nl).
IQ4NL = Codebook(
    "iq4nl",
    tuple(
        float(v) for v in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    ),
)

LEVELS: dict[str, AbstractLevels] = {
    levels.name: levels
    for levels in (
        *(Int(bits) for bits in range(2, 9)),
        *(Int(bits, signed=False) for bits in range(2, 9)),
        *(E4M3, E5M2, E2M1, E3M2, E2M3, E8M0),
        *(NF4, IQ4NL),
    )
}
