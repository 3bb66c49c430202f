"""What an algorithm is: settings, and one method that works on one layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from ongrid._config import Table, parse
from ongrid.calibrate.replay import Propagation, Replay
from ongrid.errors import CalibrationError
from ongrid.nn import WEIGHT, QuantizerSpec

Notes = dict[str, dict[str, Any]]
"""What is reported of each linear, by path: plain numbers and strings, no timings."""


class AbstractAlgorithm(ABC):
    """Settings (a frozen dataclass) with one method, `run`.

    Laws: output goes only into the weights and quantizers of `layer`, and into what `also_trains`
    names; the same replay gives the same result; in the algorithm's own objective it is never worse
    than plain rounding on the calibration statistics; the plan is respected.
    """

    propagate: Propagation
    needs_targets: ClassVar[bool] = False
    """Whether it trains towards what the float model computes, which then goes along."""

    @abstractmethod
    def needs_inputs(self, specs: Mapping[str, QuantizerSpec]) -> bool:
        """Whether these quantizers need data. Where none does, no layer is run at all."""

    @abstractmethod
    def run(self, layer: nn.Module, replay: Replay) -> Notes:
        """Calibrates every quantizer of a layer whose linears are `QuantLinear`s, in place.

        Weights are `LatentWeight`s that hold plain rounding; one that is left alone stays that.
        """

    def also_trains(self, layer: nn.Module) -> list[str]:
        """Names of float parameters of a layer that `run` may change too."""
        return []

    def check(self, specs: Mapping[str, QuantizerSpec]) -> list[CalibrationError]:
        """What this algorithm cannot do with these quantizers, before any layer is touched."""
        return []


ALGORITHMS = Table(
    "algorithm",
    {
        "rtn": "ongrid.calibrate.ranges:Rtn",
        "max": "ongrid.calibrate.ranges:Max",
        "mse": "ongrid.calibrate.ranges:Mse",
        "gptq": "ongrid.calibrate.gptq:Gptq",
        "block_ap": "ongrid.calibrate.block_ap:BlockAp",
        "signround": "ongrid.calibrate.signround:SignRound",
    },
)


def parse_algorithm(text: str) -> AbstractAlgorithm:
    """An algorithm from `gptq` or `gptq:damp=0.05,act_order=true`."""
    return parse(text, ALGORITHMS)


def static_activations(specs: Mapping[str, QuantizerSpec]) -> list[str]:
    """Paths of the quantizers whose range only data can tell."""
    return [p for p, s in specs.items() if not p.endswith(WEIGHT) and not s.dynamic]
