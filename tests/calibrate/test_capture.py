"""Capture against a plain forward with hooks: what every layer is handed and hands on, bit for bit.

A layer run alone executes the very operations of the whole forward on the very same inputs, so
equality is exact, padding positions included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ongrid
import toy
from ongrid.calibrate.capture import Capture, capture
from ongrid.calibrate.data import device_of, read_calls, run_all
from ongrid.calibrate.replay import Replay
from ongrid.errors import CalibrationError, StructureError
from ongrid.hf.load import load_hollow
from ongrid.nn import find_stack

PADDINGS = ("none", "right", "left")


def data(padding: str) -> list[dict[str, Tensor]]:
    """Batches of different lengths, longer than every window of attention."""
    batches = [{"input_ids": toy.ids(2, 40, seed=1)}, {"input_ids": toy.ids(3, 17, seed=2)}]
    if padding != "none":
        batches.append(toy.padded([29, 40], side=padding, seed=3))
    return batches


def plain(model: Any, batches: list[dict[str, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Inputs and outputs of every layer, batch by batch, in the model's own forward."""
    stack = find_stack(model)
    seen = []
    for batch in batches:
        mask = batch.get("attention_mask")
        if mask is not None and not mask[:, 0].all():
            # What generation gives to rows that are padded on the left.
            batch = {**batch, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        seen.append(toy.outputs_of(model, stack.layers(model), batch))
    return seen


def captured(model: Any, batches: Any) -> Capture:
    return capture(model, find_stack(model), run_all(read_calls(model, batches)))


def differences(model: Any, found: Capture, seen: list[list[tuple[Tensor, Tensor]]]) -> list[str]:
    """Runs the layers one by one; says where one got or gave what it does not in the model."""
    wrong = []
    replay = Replay(found, "float")
    for index, layer in enumerate(find_stack(model).layers(model)):
        replay.enter(index)
        before = list(replay.hidden)
        replay.settle(layer)
        replay.advance(layer)
        for batch, (x, y) in enumerate(of_batch[index] for of_batch in seen):
            wrong += [f"input of {index}, batch {batch}"] * (not torch.equal(before[batch], x))
            wrong += [f"output of {index}, batch {batch}"] * (
                not torch.equal(found.hidden[batch], y)
            )
    return wrong


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", toy.FAMILIES)
def test_layer_by_layer_is_the_forward(family: str, padding: str, attention: str):
    model = toy.build(family, attention=attention)
    batches = data(padding)
    found = captured(model, batches)
    assert found.tokens == 80 + 51 + (69 if padding != "none" else 0)
    assert differences(model, found, plain(model, batches)) == []


def test_layers_of_one_model_differ_in_mask_and_rotary_table():
    """The case above would be vacuous if all layers of Gemma 3 were called alike."""
    model = toy.build("gemma3")
    calls = captured(model, data("none")).calls
    tables = {id(call.kwargs["position_embeddings"]) for (call, _) in calls}
    masks = {id(call.kwargs["attention_mask"]) for (call, _) in calls}
    assert len(tables) == 2 and len(masks) == 2
    assert calls[0][0].kwargs["attention_mask"] is calls[1][0].kwargs["attention_mask"]


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_from_disk(family: str, tmp_path: Path):
    model = toy.build(family)
    hollow = load_hollow(toy.save(model, tmp_path / "m", shards=3))
    stack = find_stack(hollow.model)
    batches = data("left")
    with hollow.source.on_demand(stack.path):
        found = captured(hollow.model, batches)
    assert all(p.is_meta for p in hollow.model.parameters())
    for path in stack.paths:
        hollow.source.page_in(path)
    assert differences(hollow.model, found, plain(model, batches)) == []


def test_groups_of_a_transposed_weight_run_along_the_input(tmp_path: Path):
    model = toy.build("gpt2")
    folder = toy.save(model, tmp_path / "m")
    artifact = ongrid.quantize(folder, toy.recipe("int4.16.code.fp16"), out=tmp_path / "q")
    live = ongrid.quantize(model, toy.recipe("int4.16.code.fp16"))
    shapes = {"attn.c_attn": (192, 64), "attn.c_proj": (64, 64), "mlp.c_fc": (256, 64)}
    shapes["mlp.c_proj"] = (64, 256)
    source = toy.build("gpt2")
    for index in range(3):
        for name, (rows, cols) in shapes.items():
            path = f"transformer.h.{index}.{name}"
            q = artifact.matrix(path)
            assert q.parts.scale.shape == (rows, cols // 16)
            w = source.get_submodule(path).weight.detach().T
            assert torch.equal(q.parts.scale, q.grid.fit(w.contiguous())[0])
            assert torch.equal(live.get_submodule(path).weight, q.dequantize(torch.float32))


# ---- what a model may do, and what is refused ------------------------------------------------


class Layer(nn.Module):
    """h + tanh(W h), in one of the ways in which models return it."""

    def __init__(self, returns: int = 0) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.returns = returns

    def forward(self, hidden_states: Tensor, cache: Any = None, scale: float = 1.0) -> Any:
        h = hidden_states + scale * torch.tanh(self.proj(hidden_states))
        return (h, *[None] * (self.returns - 1)) if self.returns else h


class Parent(nn.Module):
    """A model whose way of running its layers is given."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Any], returns: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer(returns) for _ in range(3))
        self.head = nn.Linear(8, 16)
        self.run = run

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Any:
        return self.head(self.run(self.layers, self.embed(input_ids)))


def pair(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        h, _ = layer(h)
    return h


def triple(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        h, _, _ = layer(h)
    return h


def first(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        h = layer(h)[0]
    return h


def second_if_there(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        out = layer(hidden_states=h, scale=0.5)
        h, _ = out[0], out[1] if len(out) > 1 else None
    return h


def chain(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        h = layer(h)
    return h


SMALL = [{"input_ids": torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(0))}]


@pytest.mark.parametrize(
    ("run", "returns"),
    [(chain, 0), (first, 1), (first, 2), (pair, 2), (triple, 3), (second_if_there, 2)],
)
def test_layers_that_return_tuples(run: Callable[..., Any], returns: int):
    model = Parent(run, returns)
    # Two rows: a bare hidden state could be unpacked into two halves, or indexed, without an error.
    found = captured(model, SMALL)
    assert differences(model, found, plain(model, SMALL)) == []


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("run", "returns"), [(chain, 0), (first, 1), (pair, 2), (triple, 3)])
def test_the_head_is_fed_as_in_the_model(run: Callable[..., Any], returns: int, layers: int):
    """Also behind a single layer, whose output form no second layer shows."""
    model = Parent(run, returns)
    model.layers = model.layers[:layers]
    inputs = toy.fed(model, "head", lambda: [model(**batch) for batch in SMALL])
    grids = {"weight": "int8.channel.sym.fp32", "input": "int8.tensor.sym.fp32"}
    rules = [{"match": f"head.{kind}_quantizer", "grid": grid} for kind, grid in grids.items()]
    done = ongrid.quantize(model, {"rules": rules, "layers": "layers"}, SMALL, algorithm="max")
    scale = done.head.input_quantizer.scale
    highest, lowest = inputs[0].max() / 127, inputs[0].min() / -128
    assert torch.equal(scale.flatten(), torch.maximum(highest, lowest)[None])


def between(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        h = layer(h) * 2.0
    return h


def residual_between(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        h = h + layer(h)
    return h


def cast_between(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        h = layer(h).double().float()
    return h


def copied(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        h = layer(h).clone()
    return h


def backwards(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in reversed(layers):
        h = layer(h)
    return h


def skipping(layers: nn.ModuleList, h: Tensor) -> Tensor:
    return layers[2](layers[0](h))


def twice(layers: nn.ModuleList, h: Tensor) -> Tensor:
    for layer in layers:
        h = layer(layer(h))
    return h


def early(layers: nn.ModuleList, h: Tensor) -> Tensor:
    return layers[1](layers[0](h))


class State:
    """An object with a state of its own, such as a cache."""


def with_cache(layers: nn.ModuleList, h: Tensor) -> Tensor:
    cache = State()
    for layer in layers:
        h = layer(h, cache)
    return h


def flat(layers: nn.ModuleList, h: Tensor) -> Tensor:
    return chain(layers, h.flatten(0, 1))


REFUSALS = {
    "between": (between, "layer 1 was not handed what layer 0 returned"),
    "residual": (residual_between, "layer 1 was not handed what layer 0 returned"),
    "cast": (cast_between, "layer 1 was not handed what layer 0 returned"),
    "copied": (copied, "layer 1 was not handed what layer 0 returned"),
    "backwards": (backwards, "layer 2 was called when layer 0 was due"),
    "skipping": (skipping, "layer 2 was called when layer 1 was due"),
    "twice": (twice, "layer 0 was called when layer 1 was due"),
    "early": (early, "ended after 2 of 3 layers"),
    "cache": (with_cache, r"layers\.0, argument 1: a State is handed to the layer"),
    "flat": (flat, "layer 0 is not called with a hidden state"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str):
    run, message = REFUSALS[case]
    model = Parent(run)
    before = trace(model)
    with pytest.raises(StructureError, match=message) as caught:
        captured(model, SMALL)
    assert caught.value.where.startswith("layers")
    assert caught.value.remedy
    assert trace(model) == before


def test_a_model_begins_where_its_first_parameter_with_memory_is():
    """Batches go there; a model without any memory takes them as they are."""
    model = Parent(chain)
    assert device_of(model) == torch.device("cpu")
    model.embed.to("meta")
    assert device_of(model) == torch.device("cpu")
    assert device_of(model.to("meta")) is None
    (call,) = read_calls(model, SMALL)
    assert call.kwargs["input_ids"] is SMALL[0]["input_ids"]


def test_errors_of_the_model_itself_are_not_dressed_up():
    model = Parent(chain)
    with pytest.raises(IndexError, match="out of range"):
        captured(model, [{"input_ids": torch.full((1, 4), 99)}])


def test_no_batch():
    model = Parent(chain)
    for empty in ([], iter(()), lambda model: None):
        with pytest.raises(CalibrationError, match="no batch"):
            captured(model, empty)
    with pytest.raises(CalibrationError, match="no batch"):
        capture(model, find_stack(model), lambda model: None)


def test_masks_that_do_not_tell_padding():
    model = Parent(chain)
    mask = torch.ones(2, 1, 5, 5)
    with pytest.raises(CalibrationError, match=r"expected \(2, 5\), found \(2, 1, 5, 5\)"):
        captured(model, [{**SMALL[0], "attention_mask": mask}])


def test_a_mask_is_found_however_a_model_takes_it():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])

    class Renamed(Parent):
        def forward(self, input_ids: Tensor, **anything: Any) -> Any:
            return super().forward(input_ids)

    for model in (Parent(chain), Renamed(chain)):
        found = captured(model, [{**SMALL[0], "attention_mask": mask}])
        assert found.tokens == 8
    by_position = capture(
        Parent(chain), find_stack(model), lambda m: m(SMALL[0]["input_ids"], mask)
    )
    assert by_position.tokens == 8


# ---- forward loops ---------------------------------------------------------------------------


def test_forward_loop():
    model = toy.build()
    batches = data("left")

    def loop(model: Any) -> None:
        for batch in batches:
            model(**batch, labels=batch["input_ids"])

    found = captured(model, loop)
    # Labels would cost a loss at every call.
    assert all(set(call.kwargs) & {"labels"} == set() for call in read_calls(model, loop))
    assert differences(model, found, plain(model, batches)) == []


def test_forward_loop_that_fails_leaves_the_model_alone():
    model = toy.build()
    before = trace(model)

    def loop(model: Any) -> None:
        model(toy.ids(2, 5))
        raise RuntimeError("out of data")

    with pytest.raises(RuntimeError, match="out of data"):
        read_calls(model, loop)
    assert trace(model) == before


# ---- cleaning up -----------------------------------------------------------------------------


def trace(model: nn.Module) -> list[Any]:
    """All that capture could leave behind: by identity, and tensors with their bytes."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        found.append((name, id(module), module.training, [len(h) for h in hooks]))
        found.append(sorted(module.__dict__))
        found.append(id(module.__dict__.get("forward")))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.append((name, id(tensor), tensor._version, tensor.requires_grad, tensor.tolist()))
    return found


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_is_changed(training: bool):
    model = toy.build().train(training)
    model.model.layers[1].mlp.train(not training)
    before = trace(model)
    captured(model, data("left"))
    assert trace(model) == before


def test_nothing_of_the_model_is_changed_by_a_failure():
    model = toy.build().train()
    before = trace(model)

    def drive(model: nn.Module) -> None:
        model(toy.ids(2, 5), use_cache=False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(model, find_stack(model), drive)
    assert trace(model) == before


def test_a_forward_of_the_instance_is_put_back():
    """Offloading tools replace `forward` on the instance, and capture must not undo that."""
    model = toy.build()
    layer = model.model.layers[1]
    own = functools.partial(layer.forward)
    layer.forward = own
    captured(model, data("none"))
    assert layer.__dict__["forward"] is own


def test_no_gradient_and_no_dropout_in_what_is_captured():
    model = toy.build("gpt2").train()
    assert model.config.embd_pdrop > 0
    found = captured(model, data("none"))
    assert not found.hidden[0].requires_grad
    assert differences(model.eval(), found, plain(model, data("none"))) == []
