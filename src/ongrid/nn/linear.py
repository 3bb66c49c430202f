"""QuantLinear, and the surgery that puts it in and freezes it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ongrid.errors import OngridError, StructureError
from ongrid.grid import Grid, QTensor
from ongrid.nn.activation import ActivationQuantizer
from ongrid.nn.weight import AbstractWeight, CodedWeight, LatentWeight

WEIGHT, INPUT, OUTPUT = "weight_quantizer", "input_quantizer", "output_quantizer"


@dataclass(frozen=True)
class QuantizerSpec:
    """What one quantizer does: its grid, and whether an activation's range follows every call."""

    grid: Grid
    dynamic: bool = False


@dataclass(frozen=True)
class LinearSite:
    """A linear layer found in a model: its sizes, and whether its weight is stored `[in out]`."""

    out_features: int
    in_features: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features


class QuantLinear(nn.Module):
    """y = output_quantizer(input_quantizer(x) W^T + bias), W given by `weight_quantizer`."""

    def __init__(
        self,
        weight_quantizer: AbstractWeight,
        bias: nn.Parameter | None = None,
        input_quantizer: ActivationQuantizer | None = None,
        output_quantizer: ActivationQuantizer | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_quantizer.shape
        self.weight_quantizer = weight_quantizer
        self.input_quantizer = input_quantizer
        self.output_quantizer = output_quantizer
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The matrix that the layer multiplies with; read-only."""
        return self.weight_quantizer()

    def forward(self, input: Tensor) -> Tensor:
        if self.input_quantizer is not None:
            input = self.input_quantizer(input)
        y = self._recomputed(input) if self._trains() else self._product(input)
        return y if self.output_quantizer is None else self.output_quantizer(y)

    def _product(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight_quantizer(), self.bias)

    def _recomputed(self, x: Tensor) -> Tensor:
        """The product, with the matrix decoded once more in the backward pass: kept until then, the
        decoded matrices of all layers would be a second model in memory. The product itself is not
        computed again.
        """
        noisy = self.weight_quantizer.training  # dropout has to draw the same numbers
        return checkpoint(self._product, x, use_reentrant=False, preserve_rng_state=noisy)

    def _trains(self) -> bool:
        """Whether a backward pass will need the decoded matrix. A compiler keeps what it likes."""
        weight = self.weight_quantizer
        return (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and weight.held is None
            and any(p.requires_grad for p in weight.parameters())
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


@dataclass(frozen=True)
class OtherWeight:
    """A parameter of 2 dimensions or more that no site holds: its shape, and why it stays float."""

    shape: tuple[int, ...]
    why: str


def find_linears(
    root: nn.Module,
    transposed: Collection[type[nn.Module]] = (),
    plain: Collection[type[nn.Module]] = (),
) -> dict[str, LinearSite]:
    """Every linear layer below `root`, by path; `transposed` classes keep weights `[in out]`.

    A linear layer computes as `nn.Linear` does, with a floating-point parameter: a subclass with a
    forward of its own is none (a router, a grouped product), unless its class is one of `plain`.
    """
    found = {}
    straight = {nn.Linear.forward, *(cls.forward for cls in plain)}
    turned = {cls.forward for cls in transposed}
    for path, module in root.named_modules():
        if isinstance(module, QuantLinear):
            found[path] = LinearSite(module.out_features, module.in_features, transposed=False)
        elif type(module).forward in straight | turned and _is_float(module.weight):
            transposes = type(module).forward in turned
            rows, cols = module.weight.shape[:: -1 if transposes else 1]
            found[path] = LinearSite(rows, cols, transposes)
    return found


def _is_float(weight: object) -> TypeGuard[nn.Parameter]:
    return isinstance(weight, nn.Parameter) and weight.is_floating_point()


def find_others(root: nn.Module, sites: Collection[str]) -> dict[str, OtherWeight]:
    """Every parameter below `root` of 2 dimensions or more that is in none of `sites`, by path."""
    held = {id(p) for site in sites for p in root.get_submodule(site).parameters()}
    found = {}
    for path, module in root.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.dim() >= 2 and id(parameter) not in held:
                why = f"{type(module).__name__} computes in its own way, not as a linear layer"
                if not parameter.is_floating_point():
                    why = f"its numbers are {parameter.dtype} already"
                elif parameter.dim() > 2:
                    why += " (fused experts are not supported yet)"
                found[name] = OtherWeight(tuple(parameter.shape), why)
    return found


def quant_linears(root: nn.Module) -> dict[str, QuantLinear]:
    """Every `QuantLinear` below `root`, by path."""
    return {p: m for p, m in root.named_modules() if isinstance(m, QuantLinear)}


def insert(
    root: nn.Module, specs: Mapping[str, QuantizerSpec], sites: Mapping[str, LinearSite]
) -> None:
    """Replaces the linears that `specs` name (by quantizer path) with `QuantLinear`, in place.

    Weights become `LatentWeight`s that start as plain rounding. The weight itself is not copied,
    except to turn a transposed one. A linear that already is a `QuantLinear` is refused: its codes
    would be quantized a second time.
    """
    for path, of_linear in group_by_linear(specs).items():
        linear = root.get_submodule(path)
        if isinstance(linear, QuantLinear):
            raise StructureError(
                "this linear is quantized already",
                where=path,
                remedy="Start from the float model, or continue from the artifact.",
            )
        weight, bias = linear.weight, linear.bias
        assert isinstance(weight, nn.Parameter)
        assert bias is None or isinstance(bias, nn.Parameter)
        w = weight
        if sites[path].transposed:
            w = nn.Parameter(weight.detach().T.contiguous(), requires_grad=weight.requires_grad)
        try:
            latent = LatentWeight(of_linear[WEIGHT].grid, w)
        except OngridError as error:
            raise error.at(f"{path}.{WEIGHT}") from None
        place(root, path, _quant_linear(latent, bias, of_linear))


def insert_empty(
    root: nn.Module,
    specs: Mapping[str, QuantizerSpec],
    sites: Mapping[str, LinearSite],
    ordered: Collection[str] = (),
) -> None:
    """As `insert`, with all-zero `CodedWeight`s, ready to load an artifact into.

    `ordered` names the linears whose columns are stored with an order.
    """
    for path, of_linear in group_by_linear(specs).items():
        old, bias = root.get_submodule(path).weight, root.get_submodule(path).bias
        assert isinstance(old, Tensor)
        assert bias is None or isinstance(bias, nn.Parameter)
        with torch.device(old.device):
            weight = CodedWeight.empty(
                of_linear[WEIGHT].grid, sites[path].shape, old.dtype, ordered=path in ordered
            )
            linear = _quant_linear(weight, bias, of_linear)
            for quantizer in (linear.input_quantizer, linear.output_quantizer):
                if quantizer is not None:
                    quantizer.allocate()
        place(root, path, linear)


def _quant_linear(
    weight: AbstractWeight, bias: nn.Parameter | None, specs: Mapping[str, QuantizerSpec]
) -> QuantLinear:
    activations = {
        kind: ActivationQuantizer(specs[kind].grid, dynamic=specs[kind].dynamic)
        for kind in (INPUT, OUTPUT)
        if kind in specs
    }
    return QuantLinear(weight, bias, activations.get(INPUT), activations.get(OUTPUT))


def group_by_linear(
    specs: Mapping[str, QuantizerSpec],
) -> dict[str, dict[str, QuantizerSpec]]:
    """Specs by the linear's path, then by the kind of quantizer."""
    grouped: dict[str, dict[str, QuantizerSpec]] = {}
    for path, spec in specs.items():
        linear, _, kind = path.rpartition(".")
        grouped.setdefault(linear, {})[kind] = spec
    return grouped


def freeze(root: nn.Module) -> dict[str, QTensor]:
    """Fixes the codes of every weight below `root`; returns them by the linear's path.

    Afterwards `root.state_dict()` holds exactly the tensors that an artifact stores.
    """
    frozen = {}
    for path, linear in quant_linears(root).items():
        weight = linear.weight_quantizer
        frozen[path] = weight.freeze()
        linear.weight_quantizer = CodedWeight(frozen[path], weight.dtype)
    return frozen


@contextmanager
def bypassed(root: nn.Module, *, activations: bool) -> Iterator[None]:
    """Within the context `root` computes with its float weights, and activations if asked."""
    quantizers = [
        module
        for module in root.modules()
        if isinstance(module, AbstractWeight)
        or (activations and isinstance(module, ActivationQuantizer))
    ]
    before = [quantizer.bypassed for quantizer in quantizers]
    for quantizer in quantizers:
        quantizer.bypassed = True
    try:
        yield
    finally:
        for quantizer, was in zip(quantizers, before, strict=True):
            quantizer.bypassed = was


@contextmanager
def held(root: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within the context every weight below `root` is decoded once, not at every use.

    Gives the matrices that the linears multiply with meanwhile, by path.
    """
    weights = {path: linear.weight_quantizer for path, linear in quant_linears(root).items()}
    used = {path: weight() for path, weight in weights.items()}
    for path, weight in weights.items():
        weight.held = used[path]
    try:
        yield used
    finally:
        for weight in weights.values():
            weight.held = None


def place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Puts a module at a path below `root`."""
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)
