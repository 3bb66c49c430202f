"""Sixty steps of every kind of weight, eager and compiled: what computed is what is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ongrid
import toy
from laws import oracle
from laws.products import products
from laws.table import assert_same
from ongrid.calibrate.signround import RoundedWeight
from ongrid.grid import Grid
from ongrid.nn import (
    AbstractWeight,
    LatentWeight,
    QuantizerSpec,
    find_linears,
    insert,
    quant_linears,
)
from ongrid.tune.method import Peqa, attach
from ongrid.tune.qalora import QaLora

GRID = "int3.16.code.fp16"


def _latent(model: Any) -> None:
    linears = {p: s for p, s in find_linears(model).items() if p != "lm_head"}
    specs = {f"{path}.weight_quantizer": QuantizerSpec(Grid.parse(GRID)) for path in linears}
    insert(model, specs, linears)
    for linear in quant_linears(model).values():
        weight: Any = linear.weight_quantizer
        master = weight.latent.detach().float()
        linear.weight_quantizer = LatentWeight(weight.grid, master, weight.dtype)


def _rounded(model: Any) -> None:
    _latent(model)
    for linear in quant_linears(model).values():
        weight: Any = linear.weight_quantizer
        linear.weight_quantizer = RoundedWeight(weight)


def _tuned(method: Any) -> Any:
    def prepare(model: Any) -> None:
        ongrid.quantize(model, toy.recipe(GRID))
        attach(model, method)

    return prepare


KINDS = {
    "latent": _latent,
    "rounded": _rounded,
    "coded": _tuned(Peqa(zeros=True)),
    "shifted": _tuned(QaLora(rank=3, alpha=8.0, dropout=0.2, scales=True)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def trained(kind: str, dtype: torch.dtype, *, compiled: bool, autocast: bool = False) -> Any:
    """A model with one layer after 60 steps on all that its weights train."""
    model = toy.build(dtype=dtype, num_hidden_layers=1)
    KINDS[kind](model)
    model.requires_grad_(False)
    weights: list[AbstractWeight] = [q.weight_quantizer for q in quant_linears(model).values()]
    parameters = [p.requires_grad_() for weight in weights for p in weight.parameters()]
    assert all(p.dtype == torch.float32 for p in parameters)
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)
    run: Any = torch.compile(model) if compiled else model
    ids = toy.ids(2, 12)
    model.train()
    for _ in range(60):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(p, then) for p, then in zip(parameters, before, strict=True))
    return model.eval()


def check(model: Any, dtype: torch.dtype) -> None:
    """What products are given, against an independent decoder of what would be stored."""
    for path, linear in quant_linears(model).items():
        frozen = linear.weight_quantizer.freeze()
        result = oracle.as_result(frozen.grid, frozen.parts)
        stored = torch.from_numpy(oracle.decode(frozen.grid, result)).to(dtype)
        x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
        with torch.no_grad(), products() as seen:
            linear(x)
        assert len(seen) == 1, path
        assert_same(seen[0].T.contiguous(), stored)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sixty_steps(kind: str, dtype: torch.dtype):
    check(trained(kind, dtype, compiled=False), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_sixty_steps_under_autocast(kind: str):
    check(trained(kind, torch.float32, compiled=False, autocast=True), torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sixty_compiled_steps(kind: str, dtype: torch.dtype):
    """And the compiled weights alone give the very numbers that are stored."""
    model = trained(kind, dtype, compiled=True)
    check(model, dtype)

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ModuleList(q.weight_quantizer for q in quant_linears(model).values())

        def forward(self) -> list[Tensor]:
            return [weight() for weight in self.weights]

    with torch.no_grad():
        computed = torch.compile(All())()
    for w, linear in zip(computed, quant_linears(model).values(), strict=True):
        assert_same(w, linear.weight_quantizer.freeze().dequantize(dtype))
