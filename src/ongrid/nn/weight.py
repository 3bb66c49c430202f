"""Weights on a grid: what is trained or stored, and the matrix that a layer multiplies with.

A weight says what its parts are: codes, scale and zero, already rounded to their stored form.
`forward` decodes the parts and `freeze` stores the parts, and both are final. So that the stored
weight equals the computed one is a property of the class, whatever a subclass trains:

    LatentWeight   codes = encode(W, s, z)    W, s and z may train (QAT, EfficientQAT's Block-AP)
    CodedWeight    codes are fixed            s and z may train (PEQA, EfficientQAT's E2E-QP)
    ShiftedWeight  codes are fixed            z moves by a low-rank product (tune/qalora.py)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ongrid.errors import GridError
from ongrid.grid import Grid, Parts, QTensor, expected_tensors, ops

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
        self.held: Tensor | None = None
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
        if self.held is not None:
            return self.held
        parts = self.parts()
        return ops.decode(
            parts.codes,
            self._effective(parts.scale),
            parts.zero,
            self.order,
            self._grid_string,
            self.dtype,
        )

    def _effective(self, scale: Tensor | Parts | None) -> Tensor:
        """The float32 numbers that scales stand for, decoded through the op at every level."""
        if not isinstance(scale, Parts):
            return self.grid.scales(scale)
        inner = self.scale
        assert isinstance(inner, AbstractWeight)
        s, name = inner._effective(scale.scale), inner._grid_string
        return ops.decode(scale.codes, s, scale.zero, None, name, torch.float32)

    @final
    @torch.no_grad()
    def freeze(self) -> QTensor:
        """The same matrix as it is stored; where training adds noise, as evaluation computes it."""
        training, self.training = self.training, False
        try:
            return QTensor(self.grid, _stored(self.grid, self.parts()), self.order)
        finally:
            self.training = training

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AbstractWeight:
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

    `latent` is `w` itself, not a copy. `stored` is the scale and zero to start from, in their
    stored forms; by default those that are fitted to w. `scale` and `zero` are fp32 masters,
    `[R C]`; the scale of a grid of grids is a `LatentWeight` in turn. A parameter that is passed
    keeps its `requires_grad`; nothing else requires a gradient until it is asked to.
    """

    def __init__(
        self,
        grid: Grid,
        w: Float[Tensor, "out in"],
        dtype: torch.dtype | None = None,
        stored: tuple[Tensor | Parts | None, Tensor | None] | None = None,
    ) -> None:
        super().__init__(grid, (w.shape[0], w.shape[1]), dtype or w.dtype)
        self.latent = w if isinstance(w, nn.Parameter) else nn.Parameter(w, requires_grad=False)
        with torch.no_grad():
            self._start(*(grid.fit(w, self.dtype) if stored is None else stored))

    def _start(self, scale: Tensor | Parts | None, zero: Tensor | None) -> None:
        """Takes a fitted scale and zero. Scales on a grid keep their own fitted scale: to fit it to
        the rounded ones anew would round a second time.
        """
        if isinstance(scale, Parts):
            assert isinstance(self.grid.scale, Grid)
            self.scale = LatentWeight(self.grid.scale, self.grid.scale.decode(scale, torch.float32))
            self.scale._start(scale.scale, scale.zero)
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

    def stored_range(self) -> tuple[Tensor | Parts | None, Tensor | None]:
        """Scale and zero in their stored values, with straight-through gradients."""
        if isinstance(self.scale, LatentWeight):
            inner = self.scale.parts()
            positive = ops.positive(inner.codes, self.scale._grid_string)
            scale: Tensor | Parts | None = inner._replace(codes=positive)
        elif self.scale is None:
            scale = None
        else:
            scale = ops.store_scale(self.scale, self._grid_string)
        return scale, None if self.zero is None else ops.store_zero(self.zero, self._grid_string)

    def parts(self) -> Parts:
        scale, zero = self.stored_range()
        codes = ops.encode(self.latent, self._effective(scale), zero, None, self._grid_string)
        return Parts(codes, scale, zero)


class CodedWeight(AbstractWeight):
    """A matrix whose codes are fixed. Its state dict is what an artifact stores of it.

    Codes are held packed, at the grid's width. Parts named in `train` become fp32 masters that
    can require a gradient; the others are buffers in their stored dtype.
    """

    def __init__(self, q: QTensor, dtype: torch.dtype, train: Collection[TrainedPart] = ()) -> None:
        super().__init__(q.grid, q.shape, dtype)
        self._hold(q.tensors(), train)

    @staticmethod
    def empty(
        grid: Grid, shape: tuple[int, int], dtype: torch.dtype, *, ordered: bool = False
    ) -> CodedWeight:
        """A weight of the right shapes on the default device, all zero, to load a state into."""
        weight = CodedWeight.__new__(CodedWeight)
        AbstractWeight.__init__(weight, grid, shape, dtype)
        expected = expected_tensors(grid, shape, ordered=ordered)
        weight._hold({n: torch.zeros(size, dtype=kind) for n, (size, kind) in expected.items()}, ())
        return weight

    def _hold(self, stored: Mapping[str, Tensor], train: Collection[TrainedPart]) -> None:
        """Registers stored tensors under their own names; scales on a grid become a child."""
        inner = {n.removeprefix("scale."): t for n, t in stored.items() if n.startswith("scale.")}
        if inner:
            if train:
                raise GridError(
                    f"{self.grid} keeps its scales on a grid, which cannot train with fixed codes",
                    remedy="Train on a grid with fp16, bf16 or fp32 scales.",
                )
            assert isinstance(self.grid.scale, Grid)
            counts = self.grid.blocks.counts(self.shape)
            self.scale = CodedWeight.empty(self.grid.scale, counts, torch.float32)
            self.scale._hold(inner, ())
        self.register_buffer("codes", stored["codes"])
        for name in ("scale", "zero"):
            if name in train and name in stored:
                self.register_parameter(name, _master(stored[name]))
            elif name == "zero" or not inner:
                self.register_buffer(name, stored.get(name))
        self.order = stored.get("order")

    def stored_range(self) -> tuple[Tensor | Parts | None, Tensor | None]:
        """Scale and zero in their stored values, with straight-through gradients."""
        scale: Tensor | Parts | None
        if isinstance(self.scale, CodedWeight):
            scale = self.scale.parts()
        elif isinstance(self.scale, nn.Parameter):
            scale = ops.store_scale(self.scale, self._grid_string)
        else:
            scale = self.scale
        zero: Any = self.zero
        if isinstance(zero, nn.Parameter):
            zero = ops.store_zero(zero, self._grid_string)
        return scale, zero

    def parts(self) -> Parts:
        codes = ops.unpack(self.codes, self.grid.levels.bits, self.shape[1])
        return Parts(codes, *self.stored_range())


def _master(stored: Tensor) -> nn.Parameter:
    """What trains is fp32 whatever the model's dtype: a bf16 step at lr 1e-5 moves nothing."""
    return nn.Parameter(stored.detach().to(torch.float32, copy=True), requires_grad=False)


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
