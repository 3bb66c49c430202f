"""Weights on a grid: what is trained or stored, and the matrix that a layer multiplies with.

A weight says what its parts are: codes, scale and zero, already rounded to their stored form.
`forward` decodes the parts and `freeze` stores the parts, and both are final. So that the stored
weight equals the computed one is a property of the class, whatever a subclass trains:

    LatentWeight   codes = encode(W, s, z)    W, s and z may train (QAT, EfficientQAT's Block-AP)
    CodedWeight    codes are fixed            s and z may train (PEQA, EfficientQAT's E2E-QP)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Any, Literal, Self, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ongrid.errors import GridError
from ongrid.grid import Grid, Parts, QTensor, expected_tensors, ops, pack

TrainedPart = Literal["scale", "zero"]


class AbstractWeight(nn.Module):
    """A matrix `[out in]` on a grid, given in the compute dtype `dtype`.

    Law: `freeze().dequantize(dtype) == forward()` bit for bit, at any parameter values, eager,
    compiled and under autocast. Casting a model (`model.to(torch.bfloat16)`) changes the compute
    dtype only: stored scales and fp32 masters keep theirs.
    """

    def __init__(self, grid: Grid, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.grid = grid
        self.shape = shape
        self.dtype = dtype
        self.bypassed = False
        # The group of each column where groups are not contiguous, int32 [in].
        self.order: Tensor | None
        self.register_buffer("order", None)
        self._grid_string = str(grid)

    @abstractmethod
    def parts(self) -> Parts:
        """Codes, scale and zero in their stored values, with straight-through gradients."""

    def source(self) -> Float[Tensor, "out in"]:
        """The unquantized matrix, where one is still held; `GridError` otherwise."""
        raise GridError(
            "the unquantized weight is gone: only codes are held",
            remedy="Bypass quantizers before the layer is frozen.",
        )

    @final
    def forward(self) -> Float[Tensor, "out in"]:
        """The matrix that the layer multiplies with, in the compute dtype."""
        if self.bypassed:
            return self.source()
        parts = self.parts()
        return ops.decode(
            parts.codes,
            _effective(self.grid, parts.scale),
            parts.zero,
            self.order,
            self._grid_string,
            self.dtype,
        )

    @final
    @torch.no_grad()
    def freeze(self) -> QTensor:
        """The same matrix as it is stored."""
        return QTensor(self.grid, _stored(self.grid, self.parts()), self.order)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves tensors and keeps their dtypes; a cast changes the compute dtype instead."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(move, recurse)

    def extra_repr(self) -> str:
        return f"{self.grid}, shape={self.shape}, dtype={self.dtype}"


class LatentWeight(AbstractWeight):
    """A float matrix that is rounded to its grid on every forward; starts as plain rounding.

    `latent` is `w` itself, not a copy. `scale` and `zero` are fp32 masters, `[R C]`; the scale of a
    grid of grids is a `LatentWeight` in turn. Nothing requires a gradient until it is asked to.
    """

    def __init__(
        self, grid: Grid, w: Float[Tensor, "out in"], dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(grid, (w.shape[0], w.shape[1]), dtype or w.dtype)
        self.latent = w if isinstance(w, nn.Parameter) else nn.Parameter(w, requires_grad=False)
        with torch.no_grad():
            scale, zero = grid.fit(w, self.dtype)
        if isinstance(scale, Parts):
            assert isinstance(grid.scale, Grid)
            raw = grid.scale.decode(scale, torch.float32)
            self.scale = LatentWeight(grid.scale, raw)
        else:
            self.scale = None if scale is None else _master(scale)
        self.zero = None if zero is None else _master(zero)

    def set_range(self, scale: Tensor, zero: Tensor | None) -> None:
        """Replaces the fitted scale and zero `[R C]`, for instance by searched ones."""
        with torch.no_grad():
            if not isinstance(self.scale, nn.Parameter):
                raise GridError(f"the scales of {self.grid} follow from its weights")
            self.scale.copy_(scale)
            if self.zero is not None and zero is not None:
                self.zero.copy_(zero)

    def source(self) -> Float[Tensor, "out in"]:
        return self.latent.to(self.dtype)

    def parts(self) -> Parts:
        if isinstance(self.scale, LatentWeight):
            scale: Tensor | Parts | None = self.scale.parts()
        elif self.scale is None:
            scale = None
        else:
            scale = ops.store_scale(self.scale, self._grid_string)
        zero = None if self.zero is None else ops.store_zero(self.zero, self._grid_string)
        codes = ops.encode(
            self.latent, _effective(self.grid, scale), zero, None, self._grid_string
        )
        return Parts(codes, scale, zero)


class CodedWeight(AbstractWeight):
    """A matrix whose codes are fixed. Its state dict is what an artifact stores of it.

    Codes are held packed, at the grid's width. Parts named in `train` become fp32 masters that
    can require a gradient; the others are buffers in their stored dtype.
    """

    def __init__(
        self, q: QTensor, dtype: torch.dtype, train: Collection[TrainedPart] = ()
    ) -> None:
        super().__init__(q.grid, q.shape, dtype)
        self.register_buffer("codes", pack(q.codes, q.grid.levels.bits))
        if isinstance(q.parts.scale, Parts):
            assert isinstance(q.grid.scale, Grid)
            if train:
                raise GridError(
                    f"{q.grid} keeps its scales on a grid, which cannot train with fixed codes",
                    remedy="Train on a grid with fp16, bf16 or fp32 scales.",
                )
            self.scale = CodedWeight(QTensor(q.grid.scale, q.parts.scale), torch.float32)
        else:
            self._hold("scale", q.parts.scale, "scale" in train)
        self._hold("zero", q.parts.zero, "zero" in train)
        self.order = q.order

    @staticmethod
    def empty(
        grid: Grid, shape: tuple[int, int], dtype: torch.dtype, *, ordered: bool = False
    ) -> CodedWeight:
        """A weight of the right shapes on the meta device or the default one, to load a state into."""
        tensors = {
            name: torch.zeros(size, dtype=kind)
            for name, (size, kind) in expected_tensors(grid, shape, ordered=ordered).items()
        }
        return CodedWeight(QTensor.from_tensors(grid, shape, tensors), dtype)

    def _hold(self, name: str, stored: Tensor | None, trained: bool) -> None:
        if trained and stored is not None:
            self.register_parameter(name, _master(stored))
        else:
            self.register_buffer(name, stored)

    def parts(self) -> Parts:
        codes = ops.unpack(self.codes, self.grid.levels.bits, self.shape[1])
        scale: Tensor | Parts | None
        if isinstance(self.scale, CodedWeight):
            scale = self.scale.parts()
        elif isinstance(self.scale, nn.Parameter):
            scale = ops.store_scale(self.scale, self._grid_string)
        else:
            scale = self.scale
        zero = self.zero
        if isinstance(zero, nn.Parameter):
            zero = ops.store_zero(zero, self._grid_string)
        return Parts(codes, scale, zero)


def _master(stored: Tensor) -> nn.Parameter:
    """What trains is fp32 whatever the model computes in: a bf16 step at lr 1e-5 changes nothing."""
    return nn.Parameter(stored.detach().to(torch.float32, copy=True), requires_grad=False)


def _effective(grid: Grid, scale: Tensor | Parts | None) -> Tensor:
    """The float32 numbers that scales stand for, decoded through the op at every level."""
    if not isinstance(scale, Parts):
        return grid.scales(scale)
    assert isinstance(grid.scale, Grid)
    inner = _effective(grid.scale, scale.scale)
    return ops.decode(scale.codes, inner, scale.zero, None, str(grid.scale), torch.float32)


def _stored(grid: Grid, parts: Parts) -> Parts:
    """Parts in the dtypes of the artifact; the values do not change."""
    scale = parts.scale
    if isinstance(scale, Parts):
        assert isinstance(grid.scale, Grid)
        scale = _stored(grid.scale, scale)
    elif scale is not None:
        assert isinstance(grid.scale, torch.dtype)
        scale = scale.to(grid.scale)
    zero = parts.zero
    if zero is not None:
        zero = zero.to(grid.zero_dtype or torch.uint8)
    return Parts(parts.codes.to(torch.uint8), scale, zero)
