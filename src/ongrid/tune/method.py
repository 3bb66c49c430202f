"""What a tuning method is, and the plain one: scales train, codes stay.

A method puts a weight in place of a `CodedWeight`; what the weight computes and what it stores are
one thing by its class, so that merging never asks which method it was.

Here: PEQA (Kim et al., "Memory-Efficient Fine-Tuning of Compressed Large Language Models via
sub-4-bit Integer Quantization", 2023) and, in the same form, the end-to-end phase of EfficientQAT
(Chen et al., arXiv 2407.11062): W = (q - z) * s with codes q fixed, s trained, z on request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Generator, nn

from ongrid._config import Table, parse
from ongrid.errors import ConfigError, OngridError, StructureError, raise_all
from ongrid.nn import AbstractWeight, CodedWeight, QuantLinear, quant_linears


class AbstractMethod(ABC):
    """Settings (a frozen dataclass) of what trains in a quantized matrix, and how fast."""

    lr: float

    @abstractmethod
    def attach(self, weight: CodedWeight, generator: Generator) -> AbstractWeight:
        """A weight with the same codes, whose parameters are what trains.

        Law: as long as nothing has trained it computes, bit for bit, what `weight` does. Raises
        `GridError` for a grid on which the method cannot train. Random numbers come from
        `generator` alone.
        """


METHODS = Table(
    "tuning method",
    {"peqa": "ongrid.tune.method:Peqa", "qalora": "ongrid.tune.qalora:QaLora"},
)


def parse_method(text: str) -> AbstractMethod:
    """A method from `qalora` or `qalora:rank=8,scales=true`."""
    return parse(text, METHODS)


@dataclass(frozen=True)
class Peqa(AbstractMethod):
    """Scales train and, with `zeros`, zeros; in fp32, whatever the model's dtype.

    `lr` is EfficientQAT's for its end-to-end phase.
    """

    zeros: bool = False
    lr: float = 1e-5

    def __post_init__(self) -> None:
        check_positive("peqa", lr=self.lr)

    def attach(self, weight: CodedWeight, generator: Generator) -> AbstractWeight:
        train = ("scale", "zero") if self.zeros else ("scale",)
        return CodedWeight(weight.freeze(), weight.dtype, train=train)


def attach(model: nn.Module, method: AbstractMethod, *, seed: int = 0) -> None:
    """Lets a method train every quantized matrix of a model, in place; all else stops training.

    `model` holds `QuantLinear`s with fixed codes: one that was loaded from an artifact. Parameters
    outside of them (norms) can be set to train afterwards. Raises `StructureError` where nothing is
    quantized or a matrix is being trained already, and `GridError` for grids that the method cannot
    train, all of them together, before anything is changed.
    """
    linears = quantized(model)
    problems: list[OngridError] = []
    generator, tuned = Generator().manual_seed(seed), dict[str, AbstractWeight]()
    for path, linear in linears.items():
        try:
            tuned[path] = method.attach(_fixed(linear), generator)
        except OngridError as error:
            problems.append(error.at(path))
    raise_all(problems)
    model.requires_grad_(False)
    for path, weight in tuned.items():
        linears[path].weight_quantizer = weight.requires_grad_()


def quantized(model: nn.Module) -> dict[str, QuantLinear]:
    """The quantized linears of a model, by path; `StructureError` where there are none."""
    linears = quant_linears(model)
    if not linears:
        raise StructureError(
            "nothing in this model is quantized",
            remedy="Load an artifact that `ongrid quantize` wrote.",
        )
    return linears


def _fixed(linear: QuantLinear) -> CodedWeight:
    weight = linear.weight_quantizer
    if type(weight) is not CodedWeight or any(True for _ in weight.parameters()):
        raise StructureError(
            f"its {type(weight).__name__} is being trained already",
            remedy="Merge the model first, or start from an artifact.",
        )
    return weight


def parameter_groups(
    model: nn.Module, method: AbstractMethod, *, extra_lr: float | None = None
) -> list[dict[str, Any]]:
    """Optimizer groups of everything in a model that requires a gradient, without weight decay.

    `grid` holds what the method trains, at its learning rate. What requires a gradient elsewhere
    (norms, biases) is in the group `extra` at `extra_lr`; without one it is a `ConfigError` that
    names it, as is a model in which nothing trains.
    """
    inside = {id(p) for p in _of_weights(model) if p.requires_grad}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    outside = [(name, p) for name, p in named if id(p) not in inside]
    if not inside:
        raise ConfigError("no quantized matrix trains", remedy="Call `attach` first.")
    if outside and extra_lr is None:
        raise ConfigError(
            f"{len(outside)} parameters outside the quantized matrices train: "
            + ", ".join(name for name, _ in outside[:5]),
            remedy="Give `extra_lr`, or set their requires_grad to False.",
        )
    groups = [("grid", [p for _, p in named if id(p) in inside], method.lr)]
    if extra_lr is not None and outside:
        groups.append(("extra", [p for _, p in outside], extra_lr))
    return [
        {"name": name, "params": params, "lr": lr, "weight_decay": 0.0}
        for name, params, lr in groups
    ]


def _of_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    for linear in quant_linears(model).values():
        yield from linear.weight_quantizer.parameters()


def check_positive(where: str, **values: int | float) -> None:
    """Raises one error for every setting that is not above 0."""
    raise_all(
        [
            ConfigError(f"{name} must be above 0, not {value}", where=where)
            for name, value in values.items()
            if not value > 0
        ]
    )


def trained(model: nn.Module) -> Collection[str]:
    """The names of the parameters that require a gradient."""
    return [name for name, p in model.named_parameters() if p.requires_grad]
