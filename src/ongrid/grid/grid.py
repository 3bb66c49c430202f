"""Grids: how a matrix of numbers is held in codes, scales and zeros.

A grid has levels, blocks that share a scale, a form in which scales are stored, and optionally a
zero. With q the code, v(q) its level, s the scale and z or b the zero of its block, a number is

    zero=None      v(q) * s
    zero="code"    (v(q) - v(z)) * s       z is itself a code
    zero="shift"   v(q) * s + b            b is a stored number

computed in float32 in exactly this order and rounded once to the compute dtype. `README.md` beside
this file says why the first two are exact for integer levels with fp16 or bf16 scales.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ongrid.errors import GridError, NonFiniteError
from ongrid.grid.levels import LEVELS, AbstractLevels, Int

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCKS = "Write 64, 128x128, channel or tensor; sizes from 1."


@dataclass(frozen=True)
class Blocks:
    """The rectangle of a matrix that shares one scale, in rows and columns; -1 is a whole axis."""

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if min(self.rows, self.cols) < 1 and (self.rows, self.cols) not in ((1, -1), (-1, -1)):
            raise GridError(f"blocks of {self.rows} rows and {self.cols} columns", remedy=_BLOCKS)

    def counts(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many blocks a matrix has along each axis; `GridError` if they do not fit evenly."""
        problems: list[tuple[int, int, str]] = []
        counts: list[int] = []
        for size, block, axis in zip(shape, (self.rows, self.cols), ("row", "column"), strict=True):
            block = size if block == -1 else block
            if size % block:
                problems.append((size, block, axis))
            counts.append(size // block)
        if problems:
            raise GridError(
                " and ".join(
                    f"{n} {axis}s do not divide into blocks of {b}" for n, b, axis in problems
                ),
                remedy=" ".join(
                    f"Nearest {axis} sizes that do: {', '.join(map(str, near_divisors(n, b)))}."
                    for n, b, axis in problems
                ),
            )
        return counts[0], counts[1]

    def __str__(self) -> str:
        named = {(1, -1): "channel", (-1, -1): "tensor"}
        if (self.rows, self.cols) in named:
            return named[(self.rows, self.cols)]
        return str(self.cols) if self.rows == 1 else f"{self.rows}x{self.cols}"

    @staticmethod
    def parse(text: str) -> Blocks:
        if text in ("channel", "tensor"):
            return Blocks(1 if text == "channel" else -1, -1)
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
        sizes = (int(match[1] or 1), int(match[2])) if match else (0, 0)
        if min(sizes) < 1:
            raise GridError(f"blocks {text!r}", remedy=_BLOCKS)
        return Blocks(*sizes)


def near_divisors(size: int, block: int) -> list[int]:
    """The divisors of `size` on both sides of `block`: the block sizes to use instead."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    below = [d for d in divisors if d < block][-2:]
    return below + [d for d in divisors if d > block][:1]


class Parts(NamedTuple):
    """What is stored of a matrix: codes `[out in]`, a scale and a zero for every block `[R C]`.

    `scale` is a tensor, `Parts` on the scale's own grid, or None for an unscaled grid. `zero` holds
    codes (uint8) or numbers, or is None. During training codes and zeros may be float32 tensors
    that carry gradients; their values are those that will be stored.
    """

    codes: Tensor
    scale: Tensor | Parts | None
    zero: Tensor | None


@dataclass(frozen=True)
class Grid:
    """A number format for matrices. Frozen and without tensors: two grids with equal strings are
    equal.

    `scale` is the dtype in which scales are stored, a grid on which they lie, or None (every scale
    is 1). `zero_dtype` is the dtype of a stored shift and None otherwise. Laws: `decode(encode(w))`
    is idempotent; the range of a block always includes zero; a scale is finite and positive after
    rounding to its stored form.
    """

    levels: AbstractLevels
    blocks: Blocks
    scale: torch.dtype | Grid | None
    zero: Literal["code", "shift"] | None = None
    zero_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.zero is not None and not isinstance(self.levels, Int):
            raise GridError(
                f"{self.levels.name} levels with a zero", remedy="Only integer levels have a zero."
            )
        if self.zero == "code" and isinstance(self.levels, Int) and not self.levels.signed:
            raise GridError(
                f"{self.levels.name} with a zero code is written int{self.levels.bits}",
                remedy="The codes are the same; one grid has one name.",
            )
        if self.zero == "shift" and isinstance(self.levels, Int) and self.levels.signed:
            raise GridError(
                f"{self.levels.name} with a shift",
                remedy=f"A shifted grid counts from 0: write uint{self.levels.bits}.",
            )
        if (self.zero == "shift") != (self.zero_dtype is not None):
            raise GridError("a shift needs a stored dtype, and only a shift has one")
        if self.scale is None and self.zero is not None:
            raise GridError("an unscaled grid has no zero")
        if isinstance(self.scale, Grid) and self.scale.zero is not None:
            raise GridError(f"scales on {self.scale}", remedy="A grid of scales is symmetric.")
        for dtype in (self.scale, self.zero_dtype):
            if isinstance(dtype, torch.dtype) and dtype not in _DTYPE_NAMES:
                raise GridError(f"scales are stored in {', '.join(DTYPES)}, not {dtype}")

    # ---- the string ---------------------------------------------------------------------------

    def __str__(self) -> str:
        scale = self.scale
        stored = (
            "one"
            if scale is None
            else f"[{scale}]"
            if isinstance(scale, Grid)
            else _DTYPE_NAMES[scale]
        )
        words = [self.levels.name, str(self.blocks), self.zero or "sym", stored]
        if self.zero_dtype is not None and self.zero_dtype != self.scale:
            words.append(_DTYPE_NAMES[self.zero_dtype])
        return ".".join(words)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def parse(text: str) -> Grid:
        """The grid that a string such as `int4.64.code.fp16` names; `GridError` if none."""
        match = re.fullmatch(r"(\w+)\.(\w+)\.(sym|code|shift)\.(one|\w+|\[.+\])(?:\.(\w+))?", text)
        if not match:
            raise GridError(
                f"{text!r} is not a grid",
                remedy="Write levels.blocks.zero.scale, such as int4.64.code.fp16.",
            )
        levels, blocks, zero, stored, zero_dtype = match.groups()
        if levels not in LEVELS:
            raise GridError(
                f"no levels {levels!r} in {text!r}", remedy=f"Known: {', '.join(LEVELS)}."
            )
        for word in (stored, zero_dtype):
            if word and word != "one" and not word.startswith("[") and word not in DTYPES:
                raise GridError(
                    f"no dtype {word!r} in {text!r}", remedy=f"Known: {', '.join(DTYPES)}."
                )
        scale = (
            None
            if stored == "one"
            else Grid.parse(stored[1:-1])
            if stored.startswith("[")
            else DTYPES[stored]
        )
        shift_dtype = DTYPES[zero_dtype] if zero_dtype else scale
        if zero == "shift" and not isinstance(shift_dtype, torch.dtype):
            raise GridError(
                f"{text!r} does not say how the shift is stored", remedy="Append .fp16."
            )
        if zero != "shift" and zero_dtype:
            raise GridError(f"{text!r}: only a shift has a dtype of its own")
        return Grid(
            LEVELS[levels],
            Blocks.parse(blocks),
            scale,
            None if zero == "sym" else "code" if zero == "code" else "shift",
            shift_dtype if zero == "shift" and isinstance(shift_dtype, torch.dtype) else None,
        )

    # ---- fitting ------------------------------------------------------------------------------

    def fit(
        self, w: Float[Tensor, "out in"], dtype: torch.dtype | None = None
    ) -> tuple[Tensor | Parts | None, Tensor | None]:
        """Stored scale and zero whose range covers every block of w, and zero.

        `dtype` is the compute dtype, w's own by default. Raises `NonFiniteError` for a NaN or an
        infinity in w, and `GridError` where a scale is too large for its stored dtype, or its
        largest number for the compute dtype.
        """
        lo, hi = self.ranges(w)
        return self.fit_range(lo, hi, dtype or w.dtype)

    def ranges(self, w: Float[Tensor, "out in"]) -> tuple[Tensor, Tensor]:
        """Least and greatest number of each block, float32 `[R C]`, widened to include zero."""
        blocks = grouped(w, *self.blocks.counts((w.shape[0], w.shape[1])))
        lo, hi = blocks.amin((1, 3)).float(), blocks.amax((1, 3)).float()
        if not bool((torch.isfinite(lo) & torch.isfinite(hi)).all()):
            bad = int((~torch.isfinite(w)).sum())
            raise NonFiniteError(
                f"{bad} of {w.numel()} numbers are NaN or infinite",
                remedy="No grid holds these. Repair the source, or load it in a wider dtype.",
            )
        return lo.clamp_(max=0), hi.clamp_(min=0)

    def fit_range(
        self, lo: Tensor, hi: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor | Parts | None, Tensor | None]:
        """Stored scale and zero for blocks that reach from lo <= 0 to hi >= 0, float32 `[R C]`."""
        if self.zero is None and self.levels.lo >= 0 and bool((lo < 0).any()):
            raise GridError(
                f"{self.levels.name} levels reach from {self.levels.lo:g} up, the numbers down to "
                f"{float(lo.min()):.4g}",
                remedy="Use signed levels, or a grid with a zero.",
            )
        scale = self.store_scale(self.raw_scale(lo, hi))
        zero = self.store_zero(self.raw_zero(lo, scale))
        self._check_reach(scale, zero, dtype)
        return scale, zero

    def raw_scale(self, lo: Tensor, hi: Tensor) -> Tensor:
        """The smallest scale that covers [lo, hi], before rounding to its stored form."""
        if self.zero is not None:
            return (hi - lo) / (self.levels.hi - self.levels.lo)
        up = hi / self.levels.hi
        return torch.maximum(up, lo / self.levels.lo) if self.levels.lo < 0 else up

    def raw_zero(self, lo: Tensor, scale: Tensor | Parts | None) -> Tensor | None:
        """The zero that puts lo on the lowest level, before rounding to its stored form."""
        if self.zero is None:
            return None
        return lo if self.zero == "shift" else -lo / self.scales(scale)

    def store_scale(self, s: Float[Tensor, "R C"]) -> Tensor | Parts | None:
        """Scales in their stored form: finite and positive, else `GridError`.

        A scale that would be stored as 0 becomes 1: its whole block is far below one step and
        decodes to zeros. Where zero is no level, it becomes the smallest scale instead. A scale in
        the subnormal range of its dtype is rounded up, where rounding down could clip the block by
        a large factor.
        """
        if self.scale is None:
            return None
        if isinstance(self.scale, Grid):
            return self._on_scale_grid(self.scale, s)
        stored = s.to(self.scale)
        least = smallest_scale(self.scale)
        stored = torch.where(stored >= least, stored, torch.zeros_like(stored))
        tiny = torch.finfo(self.scale).tiny
        short = (stored.float() < s) & (s < tiny) & (stored > 0)
        if bool(short.any()):
            stored = torch.where(short, (stored.float() + least).to(self.scale), stored)
        self._check_stored("scale", s, stored)
        idle = 1.0 if self.levels.has_zero else least
        return torch.where(stored > 0, stored, torch.full_like(stored, idle))

    def _check_stored(self, noun: str, numbers: Tensor, stored: Tensor) -> None:
        """Refuses numbers that are not finite in the dtype in which they are stored."""
        if not bool(torch.isfinite(stored).all()):
            bf16 = torch.bfloat16
            wider = replace(
                self,
                scale=bf16 if isinstance(self.scale, torch.dtype) else self.scale,
                zero_dtype=self.zero_dtype and bf16,
            )
            raise GridError(
                f"a {noun} of {float(numbers.abs().max()):.4g} is too large for "
                f"{_DTYPE_NAMES[stored.dtype]}, whose largest number is "
                f"{torch.finfo(stored.dtype).max:.4g}",
                remedy=f"Store {noun}s in bf16 or fp32: {wider}.",
            )

    @staticmethod
    def _on_scale_grid(grid: Grid, s: Tensor) -> Parts:
        """Scales on a grid of their own; one that would be 0 takes the smallest positive level."""
        parts = grid.quantize(s, torch.float32)
        return parts._replace(codes=grid.positive_codes(parts.codes))

    def positive_codes(self, codes: Tensor) -> Tensor:
        """The codes, with the smallest positive level's in place of those that are not positive."""
        smallest = self.levels.code(torch.tensor(self.levels.tiny, device=codes.device))
        return torch.where(self.levels.value(codes) > 0, codes, smallest.to(codes.dtype))

    def store_zero(self, z: Tensor | None) -> Tensor | None:
        """Zeros in their stored form: a clamped code, or a number in the zero's dtype."""
        if z is None or self.zero is None:
            return None
        if self.zero_dtype is not None:
            stored = z.to(self.zero_dtype)
            self._check_stored("zero", z, stored)
            return stored
        return _int(self).nearest_code(z, torch.zeros((), device=z.device)).to(torch.uint8)

    def scales(self, scale: Tensor | Parts | None) -> Tensor:
        """The numbers that stored scales stand for, float32 `[R C]`."""
        if isinstance(scale, Parts):
            if not isinstance(self.scale, Grid):
                raise GridError(f"{self} does not keep its scales on a grid")
            return self.scale.decode(scale, torch.float32)
        return torch.ones(()) if scale is None else scale.float()

    def _check_reach(
        self, scale: Tensor | Parts | None, zero: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Refuses scales whose outermost levels are not finite in the compute dtype."""
        s, levels = self.scales(scale), self.levels
        ends = [torch.full_like(s, levels.lo), torch.full_like(s, levels.hi)]
        if self.zero == "code" and zero is not None:
            ends = [end - levels.value(zero) for end in ends]
        reach = torch.stack([end * s for end in ends])
        if self.zero == "shift" and zero is not None:
            reach = reach + zero.float()
        if not bool(torch.isfinite(reach.to(dtype)).all()):
            raise GridError(
                f"the grid reaches {float(reach.abs().max()):.6g}, which is not finite in {dtype}",
                remedy="Compute in bfloat16 or float32.",
            )

    # ---- encoding and decoding ----------------------------------------------------------------

    def encode(
        self,
        w: Float[Tensor, "out in"],
        scale: Tensor | Parts | None,
        zero: Tensor | None,
        order: Tensor | None = None,
    ) -> UInt8[Tensor, "out in"]:
        """The codes of the levels nearest to w under stored scales and zeros."""
        s, z = self.scales(scale), zero
        codes = encode_values(self, w, s, z, order)
        return codes.to(torch.uint8)

    def decode(
        self, parts: Parts, dtype: torch.dtype, order: Tensor | None = None
    ) -> Float[Tensor, "out in"]:
        """The numbers that codes stand for, rounded once from float32 to `dtype`."""
        return decode_values(self, parts.codes, self.scales(parts.scale), parts.zero, order, dtype)

    def quantize(self, w: Float[Tensor, "out in"], dtype: torch.dtype | None = None) -> Parts:
        """Plain rounding: fit, then encode. `dtype` is the compute dtype, w's own by default."""
        scale, zero = self.fit(w, dtype)
        return Parts(self.encode(w, scale, zero), scale, zero)

    def snap(self, w: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """w rounded to the grid, in w's dtype: what dynamic quantization computes with."""
        return self.decode(self.quantize(w), w.dtype)

    def vanished(self, w: Float[Tensor, "out in"], parts: Parts) -> int:
        """Blocks that hold a non-zero number and decode to zeros only: underflow of their scale."""
        counts = self.blocks.counts((w.shape[0], w.shape[1]))
        alive = (grouped(w, *counts) != 0).any(3).any(1)
        held = (grouped(self.decode(parts, torch.float32), *counts) != 0).any(3).any(1)
        return int((alive & ~held).sum())

    def stored_bits(self, shape: tuple[int, int]) -> int:
        """Bits that a matrix of this shape occupies on disk, scales and zeros included."""
        rows, cols = self.blocks.counts(shape)
        bits = shape[0] * (-(-shape[1] * self.levels.bits // 8) * 8)
        if isinstance(self.scale, Grid):
            bits += self.scale.stored_bits((rows, cols))
        elif self.scale is not None:
            bits += rows * cols * self.scale.itemsize * 8
        if self.zero is not None:
            bits += rows * cols * (self.zero_dtype.itemsize * 8 if self.zero_dtype else 8)
        return bits


def smallest_scale(dtype: torch.dtype) -> float:
    """The smallest scale that is stored in a dtype: one that is a normal number in float32.

    Some devices take smaller ones for 0, and a level times a smaller one may be 0.
    """
    info = torch.finfo(dtype)
    return max(info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal)


def grouped(w: Tensor, rows: int, cols: int) -> Tensor:
    """A matrix as `[R, rows per block, C, columns per block]`: a view."""
    return w.reshape(rows, w.shape[0] // rows, cols, w.shape[1] // cols)


def spread(s: Tensor, order: Tensor | None) -> Tensor:
    """One number for each block, shaped to broadcast over a grouped matrix.

    With an order, column j belongs to group `order[j]`, and every column becomes a block.
    """
    if s.dim() == 0:
        return s
    if order is not None:
        s = s[:, order.long()]
    return s[:, None, :, None]


def block_counts(s: Tensor, order: Tensor | None) -> tuple[int, int]:
    """How many blocks a matrix has along each axis, from its scales (and its order)."""
    if s.dim() == 0:
        return 1, 1
    return s.shape[0], s.shape[1] if order is None else order.shape[0]


def encode_values(
    grid: Grid, w: Tensor, s: Tensor, z: Tensor | None, order: Tensor | None
) -> Float[Tensor, "out in"]:
    """Codes as float32 numbers, from float32 scales and stored zeros.

    Blocks are taken from the shapes of w and s, so that any slice along blocks encodes alike.
    """
    blocks = grouped(w, *block_counts(s, order)).float()
    wide_z = None if z is None else spread(z.float(), order)
    return encode_each(grid, blocks, spread(s, order), wide_z).reshape(w.shape)


def decode_values(
    grid: Grid, q: Tensor, s: Tensor, z: Tensor | None, order: Tensor | None, dtype: torch.dtype
) -> Float[Tensor, "out in"]:
    """Numbers from codes (uint8, or their float32), float32 scales and stored zeros."""
    blocks = grouped(q, *block_counts(s, order))
    wide_z = None if z is None else spread(z.float(), order)
    return decode_each(grid, blocks, spread(s, order), wide_z).reshape(q.shape).to(dtype)


def encode_each(grid: Grid, w: Tensor, s: Tensor, z: Tensor | None) -> Tensor:
    """The one encoder: codes of float32 numbers, scales and zeros broadcast to them; float32."""
    if z is None:
        levels = grid.levels.nearest(w / s)
        return (
            levels - grid.levels.lo
            if isinstance(grid.levels, Int)
            else grid.levels.code(levels).float()
        )
    if grid.zero == "shift":
        return grid.levels.nearest((w - z) / s)
    return _int(grid).nearest_code(w / s, z)


def decode_each(grid: Grid, q: Tensor, s: Tensor, z: Tensor | None) -> Tensor:
    """The one decoder: float32 numbers of codes, scales and zeros broadcast to them."""
    if z is not None and grid.zero == "code":
        # v(q) - v(z) is q - z in codes: small integers, exact in float32.
        shifted = q - z if q.dtype == torch.float32 else q.to(torch.float32).sub_(z)
        return shifted.mul_(s)
    values = grid.levels.value(q).mul_(s)
    return values if z is None else values.add_(z)


def _int(grid: Grid) -> Int:
    if not isinstance(grid.levels, Int):
        raise GridError(f"{grid}: only integer levels have a zero code")
    return grid.levels
