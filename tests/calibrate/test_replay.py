"""Replay: statistics over tokens and never over padding, shared where inputs are one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ongrid
import toy
from ongrid.calibrate.capture import Call, Capture, capture
from ongrid.calibrate.chain import Chain
from ongrid.calibrate.data import read_calls, run_all
from ongrid.calibrate.gptq import SecondMoment
from ongrid.calibrate.ranges import Range
from ongrid.calibrate.replay import AbstractReduction, Propagation, Replay
from ongrid.errors import NonFiniteError, StructureError
from ongrid.nn import ActivationQuantizer, QuantizerSpec, find_linears, find_stack, insert

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
LINEARS = [*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
WEIGHT, STATIC = "int4.32.sym.fp16", "int8.tensor.sym.fp32"


def replayed(model: Any, batches: Any, propagate: Propagation = "float") -> Replay:
    return Replay(capture(model, find_stack(model), run_all(read_calls(model, batches))), propagate)


def specs(*paths: str, **kinds: str) -> dict[str, QuantizerSpec]:
    return {
        f"{path}.{kind}_quantizer": QuantizerSpec(ongrid.Grid.parse(grid))
        for path in paths
        for kind, grid in kinds.items()
    }


def second_moments(model: Any, row: Tensor) -> list[dict[str, Tensor]]:
    """The oracle: X^T X in float64 of every linear, in a plain forward of one row."""
    seen: list[dict[str, Tensor]] = []
    handles = []
    for layer in model.model.layers:
        seen.append({})
        for path in LINEARS:

            def hook(module: nn.Module, args: Any, path: str = path, here: Any = seen[-1]) -> None:
                x = args[0].flatten(0, -2).double()
                here[path] = x.T @ x

            handles.append(layer.get_submodule(path).register_forward_pre_hook(hook))
    with torch.no_grad():
        model(input_ids=row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_never_counts(side: str, attention: str):
    """T06: rows of 7 and 12 tokens; the pad id is the eos id, which is also a token of row 2.

    Bound: float32 sums against float64, and attention over 12 columns instead of 7; 1e-4 of the
    largest entry, which is an input's own energy.
    """
    model = toy.build(attention=attention)
    assert model.config.pad_token_id == model.config.eos_token_id == 2
    batch = toy.padded([7, 12], side=side)
    batch["input_ids"][1, 4] = 2
    rows = [batch["input_ids"][i][batch["attention_mask"][i].bool()] for i in range(2)]
    assert [len(row) for row in rows] == [7, 12]
    alone = [second_moments(model, row) for row in rows]
    replay = replayed(model, [batch])
    assert replay.found.tokens == 19
    for index, layer in enumerate(model.model.layers):
        replay.enter(index)
        moments = replay.observe(layer, LINEARS, SecondMoment, activations=True)
        ranges = replay.observe(layer, LINEARS, Range, activations=False)
        for path in LINEARS:
            expected = alone[0][index][path] + alone[1][index][path]
            assert moments[path].tokens == ranges[path].tokens == 19
            bound = 1e-4 * float(expected.diagonal().max())
            assert float((moments[path].sum.double() - expected).abs().max()) <= bound
        replay.settle(layer)
        replay.advance(layer)


def test_the_padding_test_can_fail():
    """Were the pads counted, or the real eos not, the statistic would be off by far more."""
    model = toy.build()
    batch = toy.padded([7, 12], side="right")
    everything = replayed(model, [{"input_ids": batch["input_ids"]}])
    masked = replayed(model, [batch])
    layer = model.model.layers[0]
    a = everything.observe(layer, LINEARS, SecondMoment, activations=True)["mlp.up_proj"]
    b = masked.observe(layer, LINEARS, SecondMoment, activations=True)["mlp.up_proj"]
    assert (a.tokens, b.tokens) == (24, 19)
    assert float((a.sum - b.sum).abs().max()) > 0.01 * float(b.sum.diagonal().max())


def test_flattened_inputs_know_their_padding():
    """Some layers flatten rows and tokens before a linear; OPT once did."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.proj(hidden_states.flatten(0, 1)).view_as(hidden_states)

    x = torch.randn(2, 5, 8)
    keep = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    layer = Flat()
    replay = Replay(Capture(Chain([x]), [[Call((), {}, True)]], [keep]), "float")
    seen = replay.observe(layer, ["proj"], SecondMoment, activations=True)["proj"]
    real = torch.cat([x[0], x[1, :2]]).double()
    assert seen.tokens == 7
    # Bound: float32 rounding of 7 products.
    assert torch.allclose(seen.sum.double(), real.T @ real, rtol=1e-5, atol=1e-5)


class Pooled(nn.Module):
    """A layer whose linear sees one number for each row, not one for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.proj(hidden_states.mean(1))[:, None]


def test_padding_that_cannot_be_told_apart_is_refused():
    x, keep = torch.randn(2, 5, 8), torch.tensor([[True] * 5, [True] * 4 + [False]])
    replay = Replay(Capture(Chain([x]), [[Call((), {}, True)]], [keep]), "float")
    with pytest.raises(StructureError, match=r"(?s)padding cannot be told apart.*equal length"):
        replay.observe(Pooled(), ["proj"], SecondMoment, activations=True)


# ---- sharing ---------------------------------------------------------------------------------


class Numbered(AbstractReduction):
    """Keeps all it is given."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        self.rows.append(x.clone())


def groups(found: dict[str, Any]) -> list[set[str]]:
    by_object: dict[int, set[str]] = {}
    for path, reduction in found.items():
        by_object.setdefault(id(reduction), set()).add(path)
    return sorted(by_object.values(), key=sorted)


def test_linears_that_are_fed_one_tensor_share_a_reduction():
    model = toy.build()
    replay = replayed(model, toy.batches(3))
    found = replay.observe(model.model.layers[0], LINEARS, Numbered, activations=True)
    assert groups(found) == [
        {"mlp.down_proj"},
        {"mlp.gate_proj", "mlp.up_proj"},
        {"self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"},
        {"self_attn.o_proj"},
    ]
    assert all(len(reduction.rows) == 3 for reduction in found.values())
    assert replay.forwards == 3


@pytest.mark.parametrize("equal", [True, False])
def test_only_equal_input_quantizers_share(equal: bool):
    model = toy.build()
    layer = model.model.layers[0]
    wanted = specs(*ATTENTION[:3], weight=WEIGHT, input=STATIC)
    insert(layer, wanted, find_linears(layer))
    for scale, name in zip((0.01, 0.01, 0.01 if equal else 0.02), "qkv", strict=True):
        quantizer = layer.get_submodule(f"self_attn.{name}_proj").input_quantizer
        quantizer.scale = torch.tensor([[scale]])
    replay = replayed(model, toy.batches(2))
    found = replay.observe(layer, ATTENTION[:3], Numbered, activations=True)
    assert len(groups(found)) == (1 if equal else 2)
    plain = replay.observe(layer, ATTENTION[:3], Numbered, activations=False)
    assert len(groups(plain)) == 1
    x = plain[ATTENTION[2]].rows[0]
    step = 0.01 if equal else 0.02
    assert torch.equal(found[ATTENTION[2]].rows[0], (x / step).round().clamp(-128, 127) * step)


class Fickle(nn.Module):
    """Feeds its second linear the first one's input, but from its second call on another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.count = 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.count += 1
        other = hidden_states if self.count == 1 else 2 * hidden_states
        h = self.a(hidden_states) + self.b(other) + self.c(hidden_states)
        return h if self.count < 3 else h - self.a(h) * 0


def fickle_replay(batches: int) -> tuple[Replay, list[Tensor]]:
    hidden = [torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(9)]
    hidden = hidden[:batches]
    calls = [[Call((), {}, True) for _ in hidden]]
    return Replay(Capture(Chain(hidden), calls, [None] * batches), "float"), hidden


def test_a_module_that_is_fed_another_tensor_later_splits_off():
    """With the history that it had in common, and nothing twice or lost."""
    replay, hidden = fickle_replay(2)
    found = replay.observe(Fickle(), ["a", "b", "c"], Numbered, activations=True)
    assert groups(found) == [{"a", "c"}, {"b"}]
    assert torch.equal(torch.cat(found["a"].rows), torch.cat([h[0] for h in hidden]))
    assert torch.equal(torch.cat(found["b"].rows), torch.cat([hidden[0][0], 2 * hidden[1][0]]))


def test_a_linear_that_is_used_twice_is_refused():
    """Only its last input would be counted."""
    replay, _ = fickle_replay(3)
    with pytest.raises(StructureError, match="a: is called more than once"):
        replay.observe(Fickle(), ["a", "b", "c"], Numbered, activations=True)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.clone()
        y = self.proj(x)
        x.mul_(2)
        return x + y


def test_an_input_that_is_overwritten_is_refused():
    replay, _ = fickle_replay(1)
    with pytest.raises(StructureError, match="proj: the input was changed in place"):
        replay.observe(InPlace(), ["proj"], Numbered, activations=True)


# ---- the same again --------------------------------------------------------------------------


@pytest.mark.parametrize("propagate", ["float", "quantized"])
def test_replaying_twice_gives_equal_bits(propagate: Propagation):
    model = toy.build()
    for layer in model.model.layers:
        insert(layer, specs(*LINEARS, weight=WEIGHT), find_linears(layer))
    results = []
    for _ in range(2):
        replay = replayed(model, [*toy.batches(2), toy.padded([5, 9], side="left")], propagate)
        for index, layer in enumerate(model.model.layers):
            replay.enter(index)
            moments = replay.observe(layer, LINEARS, SecondMoment, activations=True)
            replay.settle(layer)
            replay.advance(layer)
            results.append([m.sum for m in moments.values()] + list(replay.hidden))
    half = len(results) // 2
    for first, second in zip(results[:half], results[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_observing_changes_neither_inputs_nor_layer():
    model = toy.build()
    layer = model.model.layers[0]
    replay = replayed(model, toy.batches(2), "quantized")
    kept = [(h, h.clone()) for h in replay.hidden]
    state = {n: t.clone() for n, t in layer.state_dict().items()}
    replay.observe(layer, LINEARS, SecondMoment, activations=True)
    assert all(
        now is h and torch.equal(h, c) for now, (h, c) in zip(replay.hidden, kept, strict=True)
    )
    assert all(torch.equal(t, state[n]) for n, t in layer.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.proj(hidden_states)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_inputs_are_refused_but_not_in_padding(bad: float):
    x = torch.randn(2, 3, 4)
    x[1, 2, 0] = bad
    keep = torch.tensor([[True] * 3, [True, True, False]])
    call = [[Call((), {}, True)]]
    padded = Replay(Capture(Chain([x]), call, [keep]), "float")
    seen = padded.observe(Direct(), ["proj"], SecondMoment, activations=True)["proj"]
    assert seen.tokens == 5 and bool(torch.isfinite(seen.sum).all())
    with pytest.raises(NonFiniteError, match=r"^proj: 1 of 24 inputs are ") as caught:
        Replay(Capture(Chain([x]), call, [None]), "float").observe(
            Direct(), ["proj"], SecondMoment, activations=True
        )
    assert caught.value.remedy


@pytest.mark.parametrize("algorithm", ["gptq", "max"])
def test_non_finite_inputs_name_the_linear(algorithm: str):
    """Finite weights, whose product overflows inside the second layer."""
    model = toy.build()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0] = 1e30
        model.model.layers[1].mlp.gate_proj.weight[0] = 1e30
    recipe = toy.recipe("e4m3.channel.sym.fp32", ("*.layers.*.input_quantizer", STATIC))
    with pytest.raises(NonFiniteError, match=r"^model\.layers\.1\.mlp\.down_proj") as caught:
        ongrid.quantize(model, recipe, toy.batches(1), algorithm=algorithm)
    assert "inputs are" in caught.value.what and caught.value.remedy


# ---- what a run costs ------------------------------------------------------------------------


def executions(model: Any) -> list[int]:
    """Counts how often each decoder layer really runs; a recorder in its place does not count."""
    counts = [0] * len(model.model.layers)
    for index, layer in enumerate(model.model.layers):

        def hook(module: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            counts[index] += 1

        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    return counts


def poisoned() -> Iterator[Any]:
    raise AssertionError("the calibration set was read")
    yield


@pytest.mark.parametrize("algorithm", ["rtn", "max", "mse"])
def test_weights_alone_cost_no_execution_and_no_data(algorithm: str):
    model = toy.build()
    counts = executions(model)
    ongrid.quantize(model, toy.recipe(), poisoned(), algorithm=algorithm)
    assert counts == [0, 0, 0]
    dynamic = toy.recipe()
    dynamic["rules"].append(
        {"match": "*.layers.*.input_quantizer", "grid": "int8.channel.sym.fp32", "dynamic": True}
    )
    model = toy.build()
    counts = executions(model)
    ongrid.quantize(model, dynamic, poisoned(), algorithm=algorithm)
    assert counts == [0, 0, 0]


@pytest.mark.parametrize(
    ("algorithm", "inputs", "expected"),
    [
        ("max", "static", [1, 1, 1]),
        ("mse", "static", [1, 1, 1]),
        ("gptq", "float", [2, 2, 1]),
        ("gptq:propagate=float", "float", [1, 1, 1]),
        ("gptq", "dynamic", [2, 2, 1]),
        ("gptq:propagate=float", "dynamic", [2, 2, 2]),
        ("gptq", "static", [3, 3, 2]),
        ("gptq:propagate=float", "static", [2, 2, 2]),
    ],
)
def test_executions_for_each_layer_and_batch(algorithm: str, inputs: str, expected: list[int]):
    """One for the ranges, one for the second moments, one to go on; float outputs fall out."""
    model = toy.build()
    counts = executions(model)
    recipe = toy.recipe(WEIGHT)
    rule = {"match": "*.layers.*.input_quantizer", "grid": STATIC, "dynamic": inputs == "dynamic"}
    recipe["rules"] += [rule] if inputs != "float" else []
    ongrid.quantize(model, recipe, toy.batches(2), algorithm=algorithm)
    assert counts == [2 * count for count in expected]


def test_layers_behind_the_last_that_needs_data_are_not_run():
    model = toy.build()
    counts = executions(model)
    recipe = toy.recipe(WEIGHT, ("*.layers.1.*.input_quantizer", STATIC))
    ongrid.quantize(model, recipe, toy.batches(2), algorithm="max")
    assert counts == [2, 2, 0]


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("gptq", [2, 1, 1]), ("gptq:propagate=float", [1, 1, 1])]
)
def test_a_layer_that_stays_float_is_only_passed(algorithm: str, expected: list[int]):
    model, plain = toy.build(), toy.build()
    counts = executions(model)
    recipe = toy.recipe(WEIGHT, ("*.layers.1.*", None))
    ongrid.quantize(model, recipe, toy.batches(2), algorithm=algorithm)
    assert counts == [2 * count for count in expected]
    kept = plain.model.layers[1].state_dict()
    assert all(torch.equal(t, kept[n]) for n, t in model.model.layers[1].state_dict().items())


def test_observing_needs_no_execution_of_its_own_under_float_propagation():
    """The outputs that it gives on are those of the float layer, whatever is put in it."""
    model, plain = toy.build(), toy.build()
    layer = model.model.layers[0]
    insert(layer, specs(*LINEARS, weight=WEIGHT, input=STATIC), find_linears(layer))
    for module in layer.modules():
        if isinstance(module, ActivationQuantizer):
            module.scale = torch.tensor([[0.05]])
    replay = replayed(model, toy.batches(2))
    replay.observe(layer, LINEARS, SecondMoment, activations=True)
    replay.settle(layer)
    replay.advance(layer)
    for hidden, batch in zip(replay.hidden, toy.batches(2), strict=True):
        _, after = toy.outputs_of(plain, list(plain.model.layers), batch)[0]
        assert torch.equal(hidden, after)


def test_training_mode_changes_nothing():
    """Calibration is evaluation: dropout off, no draw from the global generator, modes put back."""
    results = []
    for training in (False, True):
        model = toy.build("gpt2").train(training)
        model.transformer.h[0].mlp.train(not training)
        modes = {name: m.training for name, m in model.named_modules()}
        before = torch.random.get_rng_state()
        recipe = toy.recipe(WEIGHT, ("*.h.*.input_quantizer", STATIC))
        ongrid.quantize(model, recipe, toy.batches(2), algorithm="gptq")
        assert torch.equal(torch.random.get_rng_state(), before)
        after = {name: m.training for name, m in model.named_modules()}
        assert all(
            after[n] == mode for n, mode in modes.items() if not n.endswith(("c_fc", "c_proj"))
        )
        assert {after[n] for n in after if "_quantizer" in n and ".1." in n} == {training}
        results.append(model.state_dict())
    assert all(torch.equal(t, results[1][n]) for n, t in results[0].items())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        torch.enable_grad,
        lambda: default_dtype(torch.bfloat16),
    ],
    ids=["autocast", "inference", "gradients", "default dtype"],
)
def test_what_surrounds_the_call_changes_nothing(surroundings: Any):
    """Statistics stay float32, and layers compute in the model's own dtype."""
    recipe = toy.recipe(WEIGHT, ("*.layers.*.input_quantizer", STATIC))
    expected, model = toy.build(), toy.build()
    ongrid.quantize(expected, recipe, toy.batches(2), algorithm="gptq")
    with surroundings():
        ongrid.quantize(model, recipe, toy.batches(2), algorithm="gptq")
    state = model.state_dict()
    assert all(torch.equal(tensor, state[n]) for n, tensor in expected.state_dict().items())
    assert not any(parameter.grad_fn for parameter in model.parameters())
