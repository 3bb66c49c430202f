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
    def from_tensors(
        grid: Grid, shape: tuple[int, int], tensors: Mapping[str, Tensor]
    ) -> QTensor:
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
        """Raises `GridError` unless every scale is finite and positive and every code is a level."""
        scales = self.grid.scales(self.parts.scale)
        bad = int((~(torch.isfinite(scales) & (scales > 0))).sum())
        if bad:
            raise GridError(f"{bad} of {scales.numel()} scales are not finite and positive")
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
        mine, theirs = self.tensors(), other.tensors()
        counts = {"codes": int((self.codes != other.codes).sum()), "scale": 0, "zero": 0}
        for name in (mine.keys() | theirs.keys()) - {"codes"}:
            kind = "zero" if name.endswith("zero") else "scale"
            if name not in mine or name not in theirs:
                present = mine.get(name, theirs.get(name))
                assert present is not None
                counts[kind] += present.numel()
            else:
                counts[kind] += int((mine[name] != theirs[name]).sum())
        return Difference(counts["codes"], counts["scale"], counts["zero"])

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
    named: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"codes": ((shape[0], width), torch.uint8)}
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
