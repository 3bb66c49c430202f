"""The laws of weights under `torch.compile`: one compiled module holds every grid of the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laws.table import (
    CASES,
    DTYPES,
    FORMS,
    WEIGHTS,
    assert_same,
    disturb,
    plain,
)
from ongrid.grid import Grid
from ongrid.nn import AbstractWeight, QuantLinear

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("traceable"),
    # Inductor's own imports, the first time it compiles.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

# Eager tests cover each kind. Here the plain way through trained parts adds nothing to the others.
each_kind = pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind != "coded_trained"])


class All(nn.Module):
    """Every weight of a list, in one graph."""

    def __init__(self, weights: list[AbstractWeight]) -> None:
        super().__init__()
        self.weights = nn.ModuleList(weights)

    def forward(self) -> tuple[Tensor, ...]:
        return tuple(weight() for weight in self.weights)


def every_grid(kind: str, dtype: torch.dtype) -> All:
    names = [name for name, d in CASES if d == dtype]
    return All([WEIGHTS[kind](Grid.parse(name), dtype) for name in names])


def assert_stored_is_computed(model: All, computed: tuple[Tensor, ...]) -> None:
    for weight, found in zip(model.weights, computed, strict=True):
        assert isinstance(weight, AbstractWeight)
        assert_same(found, weight.freeze().dequantize(weight.dtype))


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_compiled_forward_is_freeze(kind: str, dtype: torch.dtype):
    model = every_grid(kind, dtype)
    compiled = torch.compile(model, fullgraph=True)
    assert_stored_is_computed(model, compiled())
    for seed in range(3):
        disturb(model, seed)
        assert_stored_is_computed(model, compiled())


@each_kind
@torch.no_grad()
def test_compiled_forward_is_freeze_under_autocast(kind: str):
    model = every_grid(kind, torch.float32)
    disturb(model)
    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_stored_is_computed(model, compiled())


@pytest.mark.parametrize("kind", ["latent", "coded_ordered"])
def test_compiled_gradients_are_the_eager_ones(kind: str):
    """In training mode: the graph that also yields gradients computes the same weights."""
    model = All([WEIGHTS[kind](Grid.parse(name), torch.bfloat16) for name in FORMS])
    model.requires_grad_()
    compiled = torch.compile(model, fullgraph=True)
    for seed in range(2):
        disturb(model, seed)
        eager, _ = gradients(model, model())
        again, gone = gradients(model, compiled())
        assert_stored_is_computed(model, gone)
        assert eager.keys() == again.keys() and len(eager) > len(FORMS)
        for name, gradient in eager.items():
            assert_same(again[name], gradient)


def gradients(model: All, out: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Of every parameter, for fixed random gradients of the outputs."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(0)
    used = [y for y in out if y.requires_grad]
    upstream = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in used]
    torch.autograd.backward(used, upstream)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return found, tuple(y.detach() for y in out)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_a_compiled_layer_multiplies_with_the_stored_weight(autocast: bool):
    """Inductor sees decode and product together, and may fuse neither into the other."""
    names = [name for name in FORMS if plain(Grid.parse(name))][::3]
    layers = nn.ModuleList(
        [QuantLinear(WEIGHTS["latent"](Grid.parse(n), torch.float32)) for n in names]
    )
    disturb(layers)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(layer(x[:, : layer.in_features]) for layer in self.layers)

    x = torch.eye(64)  # so that a product shows its factor
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = torch.compile(Layers(), fullgraph=True)(x)
    for layer, y in zip(layers, found, strict=True):
        assert isinstance(layer, QuantLinear)
        w = layer.weight_quantizer.freeze().dequantize(torch.float32)
        expected = w.bfloat16() if autocast else w
        assert torch.equal(y[: layer.in_features].T, expected)
