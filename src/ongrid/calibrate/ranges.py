"""Ranges: scales from the least and greatest numbers, or from a search for the least squared error.

`Rtn` and `Max` take the range of what is quantized. `Mse` also tries smaller ranges, which clip the
largest numbers and round all others more finely. Every candidate is fitted and rounded as it will
be stored; factor 1.0 is always one of them, so the result is never worse than plain rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ongrid.calibrate.algorithm import AbstractAlgorithm, Notes, static_activations
from ongrid.calibrate.replay import AbstractReduction, Propagation, Replay
from ongrid.errors import CalibrationError, ConfigError, OngridError
from ongrid.grid import Grid, Parts
from ongrid.grid.grid import decode_values, encode_values, grouped
from ongrid.nn import ActivationQuantizer, LatentWeight, QuantizerSpec, quant_linears


class Range(AbstractReduction):
    """Least and greatest number seen, and how many rows were."""

    def __init__(self) -> None:
        self.lo = torch.zeros(())
        self.hi = torch.zeros(())
        self.tokens = 0

    def update(self, x: Float[Tensor, "tokens features"]) -> None:
        if x.shape[0]:
            self.lo = torch.minimum(self.lo, x.amin().float().cpu())
            self.hi = torch.maximum(self.hi, x.amax().float().cpu())
            self.tokens += x.shape[0]


def calibrate_activations(layer: nn.Module, replay: Replay) -> Notes:
    """Gives every static activation quantizer of a layer the range of what it is fed.

    Ranges are observed with all quantizers off. Costs one execution per batch, or none where no
    quantizer is static.
    """
    static = {
        path: module
        for path, module in layer.named_modules()
        if isinstance(module, ActivationQuantizer) and not module.dynamic
    }
    if not static:
        return {}
    linears = quant_linears(layer)
    notes: Notes = {}
    for path, seen in replay.observe(layer, list(static), Range, activations=False).items():
        if not seen.tokens:
            raise CalibrationError(
                "no calibration token reached this quantizer",
                where=path,
                remedy="Calibrate with more or other data, or make it dynamic.",
            )
        weight = linears[path.rpartition(".")[0]].weight_quantizer
        device = next(iter(weight.state_dict().values())).device
        lo, hi = (end.reshape(1, 1).to(device) for end in (seen.lo, seen.hi))
        try:
            static[path].set_range(lo, hi, weight.dtype)
        except OngridError as error:
            raise error.at(path) from None
        notes[path] = {"lo": float(seen.lo), "hi": float(seen.hi), "tokens": seen.tokens}
    return notes


def rounding_notes(layer: nn.Module) -> Notes:
    """Blocks of each weight whose scale underflowed, where there are any."""
    notes: Notes = {}
    for path, linear in quant_linears(layer).items():
        weight = linear.weight_quantizer
        if isinstance(weight, LatentWeight):
            vanished = weight.grid.vanished(weight.latent, weight.freeze().parts)
            if vanished:
                notes[path] = {"underflowed_blocks": vanished}
    return notes


@dataclass(frozen=True)
class Rtn(AbstractAlgorithm):
    """Plain rounding of weights to the range of each block; needs no data."""

    propagate: Propagation = "float"

    def needs_inputs(self, specs: Mapping[str, QuantizerSpec]) -> bool:
        return False

    def check(self, specs: Mapping[str, QuantizerSpec]) -> list[CalibrationError]:
        static = static_activations(specs)
        if not static:
            return []
        return [
            CalibrationError(
                f"rtn sees no data, and {len(static)} quantizers need a calibrated range",
                where=", ".join(static[:3]) + (", ..." if len(static) > 3 else ""),
                remedy="Use the algorithm max, or make these quantizers dynamic.",
            )
        ]

    def run(self, layer: nn.Module, replay: Replay) -> Notes:
        return rounding_notes(layer)


@dataclass(frozen=True)
class Max(AbstractAlgorithm):
    """Plain rounding of weights, and the range of all calibration data for static activations."""

    propagate: Propagation = "float"

    def needs_inputs(self, specs: Mapping[str, QuantizerSpec]) -> bool:
        return bool(static_activations(specs))

    def run(self, layer: nn.Module, replay: Replay) -> Notes:
        return rounding_notes(layer) | calibrate_activations(layer, replay)


@dataclass(frozen=True)
class Mse(AbstractAlgorithm):
    """For each block the range, of `steps` fractions of its own down to `shrink`, of least squared
    error.

    Activations are treated as by `max`.
    """

    shrink: float = 0.4
    steps: int = 31
    propagate: Propagation = "float"

    def __post_init__(self) -> None:
        if not 0 < self.shrink <= 1:
            raise ConfigError(
                f"shrink must be above 0 and at most 1, not {self.shrink}", where="mse"
            )
        if self.steps < 2:
            raise ConfigError(f"steps must be at least 2, not {self.steps}", where="mse")

    def needs_inputs(self, specs: Mapping[str, QuantizerSpec]) -> bool:
        return bool(static_activations(specs))

    def run(self, layer: nn.Module, replay: Replay) -> Notes:
        for linear in quant_linears(layer).values():
            weight = linear.weight_quantizer
            if isinstance(weight, LatentWeight) and isinstance(weight.scale, nn.Parameter):
                scale, zero = search_range(
                    weight.grid, weight.latent.detach(), weight.dtype, self.shrink, self.steps
                )
                assert isinstance(scale, Tensor)
                weight.set_range(scale, zero)
        return rounding_notes(layer) | calibrate_activations(layer, replay)


def search_range(
    grid: Grid, w: Float[Tensor, "out in"], dtype: torch.dtype, shrink: float, steps: int
) -> tuple[Tensor | Parts | None, Tensor | None]:
    """Stored scale and zero of the range with the least squared error, block by block.

    Candidates are fractions of the full range, evenly spaced from 1.0 down to `shrink`; the running
    best is kept, and a candidate must be strictly better to replace it.
    """
    scale, zero = grid.fit(w, dtype)
    if not isinstance(scale, Tensor):
        return scale, zero
    lo, hi = grid.ranges(w)
    best = _squared_error(grid, w, scale, zero, dtype)
    for step in range(1, steps):
        factor = 1.0 - (1.0 - shrink) * step / (steps - 1)
        s, z = grid.fit_range(lo * factor, hi * factor, dtype)
        assert isinstance(s, Tensor)
        error = _squared_error(grid, w, s, z, dtype)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, s, scale)
        zero = None if zero is None or z is None else torch.where(better, z, zero)
    return scale, zero


def _squared_error(
    grid: Grid, w: Tensor, scale: Tensor | Parts | None, zero: Tensor | None, dtype: torch.dtype
) -> Float[Tensor, "R C"]:
    s = grid.scales(scale)
    q = encode_values(grid, w, s, zero, None)
    error = (decode_values(grid, q, s, zero, None, dtype).float() - w.float()).square_()
    return grouped(error, *grid.blocks.counts((w.shape[0], w.shape[1]))).sum((1, 3))
