"""Quantizers of activations: what enters or leaves a linear layer is rounded to a grid.

A dynamic quantizer fits its grid to every call. A static one holds a range that calibration gave
it, and refuses to run before that: an uncalibrated static quantizer is an error, never a dynamic
one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ongrid.errors import CalibrationError, GridError
from ongrid.grid import Grid, Parts, ops


class ActivationQuantizer(nn.Module):
    """Rounds `[... features]` to a grid that sees one row per token.

    Blocks of a dynamic grid: `channel` (a scale per token), a group size, or `tensor`. Blocks of a
    static grid span all tokens: `tensor`. Gradients pass straight through, and stop outside a
    static range.
    """

    def __init__(self, grid: Grid, *, dynamic: bool) -> None:
        super().__init__()
        if not dynamic and grid.blocks.rows != -1:
            raise GridError(
                f"a static activation grid {grid} has a scale per token",
                remedy="Use blocks `tensor`, or make the quantizer dynamic.",
            )
        if not dynamic and (isinstance(grid.scale, Grid) or grid.scale is None):
            raise GridError(f"a static activation grid needs a stored scale, not {grid}")
        self.grid = grid
        self.dynamic = dynamic
        self.bypassed = False
        self.scale: Tensor | None
        self.zero: Tensor | None
        self.register_buffer("scale", None)
        self.register_buffer("zero", None)
        self._grid_string = str(grid)

    def set_range(self, lo: Tensor, hi: Tensor, dtype: torch.dtype) -> None:
        """Fixes the range of a static quantizer: least and greatest number, float32 `[1 C]`."""
        scale, zero = self.grid.fit_range(lo.clamp(max=0), hi.clamp(min=0), dtype)
        assert not isinstance(scale, Parts)
        self.scale, self.zero = scale, zero

    def allocate(self) -> None:
        """Makes room for the stored range of a static quantizer, to load a state into."""
        if not self.dynamic and isinstance(self.grid.scale, torch.dtype):
            self.scale = torch.zeros((1, 1), dtype=self.grid.scale)
            if self.grid.zero is not None:
                self.zero = torch.zeros((1, 1), dtype=self.grid.zero_dtype or torch.uint8)

    def forward(self, x: Float[Tensor, "*tokens features"]) -> Float[Tensor, "*tokens features"]:
        if self.bypassed or x.numel() == 0:  # an expert without a token
            return x
        rows = x.reshape(-1, x.shape[-1])
        if self.dynamic:
            return ops.snap(rows, self._grid_string).reshape(x.shape)
        if self.scale is None:
            raise CalibrationError(
                f"a static quantizer on {self.grid} was never calibrated",
                remedy="Calibrate with data, or make the quantizer dynamic.",
            )
        scale = self.scale.float()
        codes = ops.encode(rows, scale, self.zero, None, self._grid_string)
        snapped = ops.decode(codes, scale, self.zero, None, self._grid_string, x.dtype)
        return snapped.reshape(x.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ActivationQuantizer:
        """Moves the stored range and keeps its dtype when the model is cast."""

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(move, recurse)

    def extra_repr(self) -> str:
        return f"{self.grid}, {'dynamic' if self.dynamic else 'static'}"
