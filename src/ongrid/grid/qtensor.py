"""QTensor: a quantized matrix as it is stored, with its grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ongrid.errors import GridError, StoreError
from ongrid.grid.bits import pack, unpack
from ongrid.grid.grid import Grid, Parts


class Difference(NamedTuple):
    """How many elements differ between two quantized matrices."""

    codes: int
    scales: int
    zeros: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True, eq=False)
class QTensor:
    """Codes `[out in]` (uint8, one a number), scales and zeros `[R C]`, and their grid.

    `order` (int32 `[in]`) gives the group of each column where groups are not contiguous. Law:
    `from_tensors(grid, shape, tensors())` equals the original.
    """

    grid: Grid
    parts: Parts
    order: Tensor | None = None

    @property
    def codes(self) -> UInt8[Tensor, "out in"]:
        return self.parts.codes

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @staticmethod
    def rounded(
        grid: Grid, w: Float[Tensor, "out in"], dtype: torch.dtype | None = None
    ) -> QTensor:
        """w rounded plainly; `dtype` is the compute dtype, w's own by default."""
        return QTensor(grid, grid.quantize(w, dtype))

    def dequantize(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """The numbers, computed in float32 and rounded once to `dtype`."""
        return self.grid.decode(self.parts, dtype, self.order)

    def tensors(self) -> dict[str, Tensor]:
        """What is written to disk: codes packed along the rows, scale, zero, order.

        The scales of a grid of grids are `scale.codes`, `scale.scale` and so on.
        """
        named = _flat(self.grid, self.parts)
        return named if self.order is None else {**named, "order": self.order}

    @staticmethod
    def from_tensors(grid: Grid, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> QTensor:
        """Reads what `tensors` wrote; `StoreError` for missing, surplus or ill-shaped tensors."""
        expected = expected_tensors(grid, shape, ordered="order" in tensors)
        for name in sorted(expected.keys() | tensors.keys()):
            if name not in tensors:
                raise StoreError(f"no tensor {name!r} for a matrix on {grid}")
            if name not in expected:
                raise StoreError(f"a tensor {name!r}, which {grid} does not have")
            found = tuple(tensors[name].shape), tensors[name].dtype
            if found != expected[name]:
                raise StoreError(
                    f"{name} is {found[0]} {found[1]}, but {grid} on {shape} needs "
                    f"{expected[name][0]} {expected[name][1]}"
                )
        return QTensor(grid, _nested(grid, shape, tensors, ""), tensors.get("order"))

    def check(self) -> None:
        """Raises `GridError` unless scales are finite and positive, and codes and zeros levels."""
        _check_codes(self.grid, self.parts)  # first: what follows looks them up
        scales = self.grid.scales(self.parts.scale)
        bad = int((~(torch.isfinite(scales) & (scales > 0))).sum())
        if bad:
            raise GridError(f"{bad} of {scales.numel()} scales are not finite and positive")
        if self.grid.zero == "code" and self.parts.zero is not None:
            bad = int((self.parts.zero > 2**self.grid.levels.bits - 1).sum())
            if bad:
                raise GridError(
                    f"{bad} of {self.parts.zero.numel()} zeros are no {self.grid} codes"
                )
        values = self.dequantize(torch.float32)
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise GridError(f"{bad} of {values.numel()} codes decode to no finite number")

    def compare(self, other: QTensor) -> Difference:
        """Counts differing codes, scales and zeros; `GridError` if the grids or shapes differ."""
        if self.grid != other.grid or self.shape != other.shape:
            raise GridError(
                f"{self.grid} {self.shape} cannot be compared with {other.grid} {other.shape}"
            )
        mine, theirs = self.parts, other.parts
        scales = _unequal_scales(mine.scale, theirs.scale) + _unequal(self.order, other.order)
        return Difference(
            _unequal(mine.codes, theirs.codes), scales, _unequal(mine.zero, theirs.zero)
        )

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each number, scales, zeros and order included."""
        order = 0 if self.order is None else self.order.numel() * 32
        return (self.grid.stored_bits(self.shape) + order) / self.codes.numel()


def expected_tensors(
    grid: Grid, shape: tuple[int, int], *, ordered: bool = False
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of every tensor that a matrix on this grid is stored in."""
    rows, cols = grid.blocks.counts(shape)
    width = -(-shape[1] * grid.levels.bits // 8)
    named: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((shape[0], width), torch.uint8)
    }
    if isinstance(grid.scale, Grid):
        inner = expected_tensors(grid.scale, (rows, cols))
        named |= {f"scale.{name}": found for name, found in inner.items()}
    elif grid.scale is not None:
        named["scale"] = ((rows, cols), grid.scale)
    if grid.zero is not None:
        named["zero"] = ((rows, cols), grid.zero_dtype or torch.uint8)
    if ordered:
        named["order"] = ((shape[1],), torch.int32)
    return named


def _check_codes(grid: Grid, parts: Parts) -> None:
    bad = int((parts.codes > 2**grid.levels.bits - 1).sum())
    if bad:
        raise GridError(f"{bad} of {parts.codes.numel()} codes do not fit {grid.levels.bits} bits")
    if isinstance(parts.scale, Parts):
        assert isinstance(grid.scale, Grid)
        _check_codes(grid.scale, parts.scale)


def _unequal(a: Tensor | None, b: Tensor | None) -> int:
    """Elements that differ; all of them where only one tensor is there."""
    if a is None or b is None:
        return sum(t.numel() for t in (a, b) if t is not None)
    return int((a != b).sum())


def _unequal_scales(a: Tensor | Parts | None, b: Tensor | Parts | None) -> int:
    if isinstance(a, Parts) and isinstance(b, Parts):
        return _unequal(a.codes, b.codes) + _unequal_scales(a.scale, b.scale)
    assert not isinstance(a, Parts) and not isinstance(b, Parts)
    return _unequal(a, b)


def _flat(grid: Grid, parts: Parts) -> dict[str, Tensor]:
    named = {"codes": pack(parts.codes.to(torch.uint8), grid.levels.bits)}
    if isinstance(parts.scale, Parts):
        assert isinstance(grid.scale, Grid)
        named |= {f"scale.{name}": t for name, t in _flat(grid.scale, parts.scale).items()}
    elif parts.scale is not None:
        named["scale"] = parts.scale
    if parts.zero is not None:
        named["zero"] = parts.zero
    return named


def _nested(
    grid: Grid, shape: tuple[int, int], tensors: Mapping[str, Tensor], prefix: str
) -> Parts:
    codes = unpack(tensors[prefix + "codes"], grid.levels.bits, shape[1])
    scale: Tensor | Parts | None = tensors.get(prefix + "scale")
    if isinstance(grid.scale, Grid):
        scale = _nested(grid.scale, grid.blocks.counts(shape), tensors, prefix + "scale.")
    return Parts(codes, scale, tensors.get(prefix + "zero"))
