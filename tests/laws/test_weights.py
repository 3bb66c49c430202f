"""Forward == freeze == file == reload, bit for bit: every kind of weight on every grid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from laws.products import products
from laws.table import CASES, DTYPES, GRIDS, WEIGHTS, assert_same, disturb, example, plain
from ongrid.errors import GridError
from ongrid.grid import Grid, QTensor
from ongrid.nn import AbstractWeight, CodedWeight, LatentWeight, QuantLinear

each = pytest.mark.parametrize("name", GRIDS)
each_case = pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
each_kind = pytest.mark.parametrize("kind", WEIGHTS)
CASTS: list[tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = [
    (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    (lambda m: m.half(), torch.float16),
    (lambda m: m.to(device="cpu"), torch.float16),
    (lambda m: m.float(), torch.float32),
    (lambda m: m.to("cpu", torch.float16), torch.float16),
]


def assert_stored_is_computed(weight: AbstractWeight) -> None:
    """The law, and the same for what is written to disk and read again."""
    computed, frozen = weight(), weight.freeze()
    assert computed.dtype == weight.dtype
    assert_same(frozen.dequantize(weight.dtype), computed)
    frozen.check()
    stored = {n: t.clone() for n, t in frozen.tensors().items()}
    again = CodedWeight.empty(
        weight.grid, weight.shape, weight.dtype, ordered=frozen.order is not None
    )
    again.load_state_dict(stored, strict=True)
    assert_same(again(), computed)
    assert again.freeze().compare(frozen).total == 0


@each_kind
@each_case
def test_forward_is_freeze(kind: str, name: str, dtype: torch.dtype):
    weight = WEIGHTS[kind](Grid.parse(name), dtype)
    assert_stored_is_computed(weight)
    for seed in range(3):
        disturb(weight, seed)
        assert_stored_is_computed(weight)
    computed, frozen = weight(), weight.freeze()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(weight(), computed)
        assert weight.freeze().compare(frozen).total == 0


@each_case
def test_a_latent_weight_starts_as_plain_rounding(name: str, dtype: torch.dtype):
    grid = Grid.parse(name)
    for seed in range(5):
        w = example(grid, dtype, seed)
        weight = LatentWeight(grid, w)
        assert weight.freeze().compare(QTensor.rounded(grid, w)).total == 0
        assert_same(weight(), grid.snap(w))


@each
@each_kind
def test_casting_a_model_changes_the_compute_dtype_alone(name: str, kind: str):
    weight = WEIGHTS[kind](Grid.parse(name), torch.float32)
    model, frozen = nn.Sequential(weight), weight.freeze()
    before = {n: t.clone() for n, t in weight.state_dict().items()}
    for cast, dtype in CASTS:
        assert cast(model) is model and weight.dtype == dtype
        after = weight.state_dict()
        assert after.keys() == before.keys()
        for n, t in before.items():
            assert_same(after[n], t)
        assert weight.freeze().compare(frozen).total == 0
        assert_same(weight(), frozen.dequantize(dtype))


@each
def test_the_state_of_a_coded_weight_is_what_an_artifact_stores(name: str):
    q = QTensor.rounded(Grid.parse(name), example(Grid.parse(name)))
    stored = q.tensors()
    weight = CodedWeight(q, torch.bfloat16)
    state = weight.state_dict()
    assert state.keys() == stored.keys()
    for n, t in stored.items():
        assert_same(state[n], t)
    assert not list(weight.parameters())
    empty = CodedWeight.empty(q.grid, q.shape, torch.bfloat16)
    assert {n: (tuple(t.shape), t.dtype) for n, t in empty.state_dict().items()} == {
        n: (tuple(t.shape), t.dtype) for n, t in stored.items()
    }
    with pytest.raises(RuntimeError, match="Missing key"):
        empty.load_state_dict({}, strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        empty.load_state_dict({**stored, "weight": stored["codes"]}, strict=True)


@each
@each_kind
def test_masters_are_fp32_and_ask_for_no_gradient_by_themselves(name: str, kind: str):
    weight = WEIGHTS[kind](Grid.parse(name), torch.bfloat16)
    for n, p in weight.named_parameters():
        assert p.dtype == (torch.bfloat16 if n == "latent" else torch.float32)
        assert not p.requires_grad
    assert not weight().requires_grad
    with torch.no_grad():
        frozen = weight.freeze()
    for p in weight.parameters():
        p.requires_grad_()
    assert not weight.freeze().dequantize(torch.float32).requires_grad
    assert weight.freeze().compare(frozen).total == 0
    assert weight().requires_grad == any(True for _ in weight.parameters())


@pytest.mark.parametrize("name", [n for n in GRIDS if isinstance(Grid.parse(n).scale, Grid)])
def test_scales_on_a_grid_cannot_train_with_fixed_codes(name: str):
    q = QTensor.rounded(Grid.parse(name), example(Grid.parse(name)))
    with pytest.raises(GridError, match="keeps its scales on a grid"):
        CodedWeight(q, torch.float32, train=["scale"])


# What the matrix product receives


@each_kind
@each_case
def test_the_matrix_product_receives_the_stored_weight(kind: str, name: str, dtype: torch.dtype):
    """Under autocast it is cast once more, as any other weight is."""
    weight = WEIGHTS[kind](Grid.parse(name), dtype)
    disturb(weight)
    linear = QuantLinear(weight, nn.Parameter(torch.ones(weight.shape[0], dtype=dtype)))
    x = torch.ones(3, weight.shape[1], dtype=dtype)
    stored = weight.freeze().dequantize(dtype)
    for used, autocast in ((dtype, False), (torch.bfloat16, True)):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
            torch.no_grad(),
            products() as factors,
        ):
            y = linear(x)
        assert len(factors) == 1
        assert_same(factors[0].T, stored.to(used))
        assert y.dtype == used


def test_every_kind_of_parameter_is_disturbed_and_every_law_could_fail():
    """A weight that forgets one stored rounding breaks the law on the examples used here."""

    class Forgetful(LatentWeight):
        def parts(self):
            parts = super().parts()
            return parts._replace(scale=self.scale)  # not rounded to fp16

    grid = Grid.parse("int4.8.sym.fp16")
    weight = Forgetful(grid, example(grid))
    disturb(weight)
    with pytest.raises(AssertionError, match="numbers differ"):
        assert_stored_is_computed(weight)
    for kind in WEIGHTS:
        for name in filter(lambda n: plain(Grid.parse(n)), GRIDS):
            weight = WEIGHTS[kind](Grid.parse(name), DTYPES[0])
            before = {n: p.clone() for n, p in weight.named_parameters()}
            disturb(weight)
            assert all(not torch.equal(p, before[n]) for n, p in weight.named_parameters())
            if "zero" in before:
                assert float(weight.get_parameter("zero").abs().max()) > 1e6
            if "scale" in before and before["scale"].numel() > 4:
                assert float(weight.get_parameter("scale").min()) < 0
