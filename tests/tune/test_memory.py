"""Tuning keeps no decoded matrix between forward and backward, and gradients do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ongrid
import toy
from laws.products import products
from laws.table import assert_same
from ongrid.grid import Grid, QTensor
from ongrid.nn import CodedWeight, QuantLinear
from ongrid.tune.method import AbstractMethod, Peqa, attach
from ongrid.tune.qalora import QaLora, ShiftedWeight

METHODS: dict[str, AbstractMethod] = {
    "peqa": Peqa(zeros=True),
    "qalora": QaLora(rank=4, scales=True),
}
each_method = pytest.mark.parametrize("name", METHODS)
OUT, IN = 48, 64


def linear(name: str, *, dropout: float = 0.0) -> QuantLinear:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(OUT, IN, generator=generator)
    q = QTensor.rounded(Grid.parse("int4.32.code.fp16"), w, torch.bfloat16)
    if name == "peqa":
        return QuantLinear(CodedWeight(q, torch.bfloat16, train=["scale"]).requires_grad_())
    weight = ShiftedWeight(q, torch.bfloat16, rank=4, factor=2.0, dropout=dropout)
    with torch.no_grad():
        weight.a.normal_(0, 1, generator=generator)
        weight.b.normal_(0, 1, generator=generator)
    return QuantLinear(weight.requires_grad_())


@contextmanager
def kept() -> Iterator[list[Tensor]]:
    """The tensors that autograd keeps for the backward pass."""
    tensors: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield tensors


@each_method
def test_no_decoded_matrix_is_kept_and_no_product_is_computed_twice(name: str):
    layer = linear(name)
    x = torch.randn(5, IN, dtype=torch.bfloat16).requires_grad_()
    with kept() as tensors:
        y = layer(x)
    assert all(t.numel() < OUT * IN or t.dtype == torch.uint8 for t in tensors)
    with products() as factors:
        y.sum().backward()
    assert len(factors) == 2  # the gradients of the inputs and of the matrix
    with torch.no_grad(), products() as factors:
        layer(x)
    assert len(factors) == 1


@each_method
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_those_of_a_kept_matrix(
    name: str, dropout: float, monkeypatch: pytest.MonkeyPatch
):
    """With dropout, the second decoding has to draw what the first one drew."""
    layer = linear(name, dropout=dropout)
    x = torch.randn(5, IN, dtype=torch.bfloat16)
    found: list[list[Tensor]] = []
    for recomputes in (True, False):
        if not recomputes:
            monkeypatch.setattr(QuantLinear, "_trains", lambda self: False)
        inputs = x.clone().requires_grad_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            y = layer.train()(inputs)
            y.float().square().sum().backward()
        gradients = [p.grad for p in (inputs, *layer.parameters()) if p.grad is not None]
        assert len(gradients) == (2 if name == "peqa" else 3)
        found.append([y, *(g.clone() for g in gradients)])
        layer.zero_grad()
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@each_method
@pytest.mark.parametrize("stored", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(name: str, stored: str, reentrant: bool):
    """T12: losses and gradients over five steps, with scales stored in each dtype."""
    runs = []
    for checkpointing in (False, True):
        model: Any = ongrid.quantize(toy.build(), toy.recipe(f"int4.32.code.{stored}"))
        attach(model, METHODS[name])
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        fixed = {n: b.clone() for n, b in model.named_buffers() if n.endswith(".codes")}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        ids, seen = toy.ids(2, 12), []
        for _ in range(5):
            loss = model.train()(input_ids=ids, labels=ids).loss
            loss.backward()
            seen += [loss.detach()] + [
                p.grad.clone() for p in model.parameters() if p.grad is not None
            ]
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(b, fixed[n]) for n, b in model.named_buffers() if n in fixed)
        runs.append(seen)
    for a, b in zip(*runs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-8)


def test_nothing_is_recomputed_where_nothing_trains():
    layer = QuantLinear(
        CodedWeight(
            QTensor.rounded(Grid.parse("int4.32.code.fp16"), torch.randn(OUT, IN)), torch.float32
        )
    )
    x = torch.randn(5, IN).requires_grad_()
    with kept() as tensors:
        nn.Sequential(layer)(x)
    assert any(t.numel() == OUT * IN for t in tensors)
