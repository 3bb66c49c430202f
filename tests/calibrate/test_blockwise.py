"""Training one layer after the other: Block-AP, SignRound, and the engine that they share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ongrid
import toy
from ongrid.calibrate.blockwise import AbstractBlockwise, Trained
from ongrid.calibrate.capture import capture
from ongrid.calibrate.data import read_calls, run_all
from ongrid.calibrate.replay import Replay
from ongrid.calibrate.signround import SignedDescent
from ongrid.errors import CalibrationError, ConfigError, NonFiniteError
from ongrid.grid import Grid
from ongrid.nn import QuantizerSpec, find_linears, find_stack, freeze, insert, quant_linears

GRID = "int2.16.code.fp16"
TRAINING: dict[str, AbstractBlockwise] = {
    "block_ap": ongrid.BlockAp(weight_lr=1e-3, quant_lr=1e-4, epochs=3),
    "signround": ongrid.SignRound(iters=30),
}
IDLE: dict[str, Any] = {
    "block_ap": lambda **settings: ongrid.BlockAp(epochs=0, **settings),
    "signround": lambda **settings: ongrid.SignRound(iters=0, **settings),
}
each = pytest.mark.parametrize("name", TRAINING)


def scene(
    batches: list[dict[str, Tensor]] | None = None,
    *,
    index: int = 1,
    grid: str = GRID,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, Replay]:
    """A layer of a random model with quantizers in it, and what it is fed."""
    model = toy.build("qwen2", dtype=dtype)
    data = toy.batches(4) if batches is None else batches
    found = capture(model, find_stack(model), run_all(read_calls(model, data)))
    layer = model.model.layers[index]
    specs = {f"{path}.weight_quantizer": QuantizerSpec(Grid.parse(grid)) for path in
             find_linears(layer)}  # fmt: skip
    insert(layer, specs, find_linears(layer))
    replay = Replay(found, "quantized", exact=True)
    replay.enter(index)
    return layer, replay


def state(layer: Any) -> dict[str, Tensor]:
    freeze(layer)
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


# ---- where it starts ---------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["rtn", "mse", "gptq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each
def test_without_a_step_the_start_is_left(name: str, dtype: torch.dtype, start: str):
    """Codes, scales and zeros to the last bit; float parameters too."""
    for grid in (GRID, "int4.16.sym.bf16", "uint3.16.shift.fp32", "e2m1.16.sym.[e4m3.2.sym.fp32]"):
        expected, replay = scene(dtype=dtype, grid=grid)
        ongrid.ALGORITHMS[start]().run(expected, replay)
        layer, replay = scene(dtype=dtype, grid=grid)
        notes = IDLE[name](start=start).run(layer, replay)
        losses = next(iter(notes.values()))
        if start == "rtn" or losses["loss_start"] <= losses["loss_plain"]:
            assert same(state(layer), state(expected)), grid
        assert not IDLE[name]().also_trains(layer) or name == "signround"


@each
def test_training_lowers_the_loss_and_moves_codes(name: str):
    layer, replay = scene()
    notes = TRAINING[name].run(layer, replay)
    for note in notes.values():
        assert note["loss_trained"] < 0.9 * note["loss_start"]
        assert note["steps"] == (12 if name == "block_ap" else 30)
    assert max(note["codes_moved"] for note in notes.values()) > 0


@each
def test_what_makes_a_layer_worse_is_undone(name: str):
    """Steps that are far too large: plain rounding is left, and norms as they were."""
    wild = {
        "block_ap": ongrid.BlockAp(weight_lr=10.0, quant_lr=10.0),
        "signround": ongrid.SignRound(iters=3, lr=1.0, range_lr=1.0),
    }[name]
    expected, replay = scene()
    plain = state(expected)
    layer, replay = scene()
    notes = wild.run(layer, replay)
    note = next(iter(notes.values()))
    assert note["loss_trained"] >= note["loss_start"]
    assert same(state(layer), plain)


def test_the_better_of_gptq_and_plain_rounding_is_left(monkeypatch: pytest.MonkeyPatch):
    """A start that is worse than plain rounding, and training that does nothing about it."""

    def spoilt(self: ongrid.Gptq, layer: Any, replay: Replay) -> dict[str, Any]:
        for linear in quant_linears(layer).values():
            with torch.no_grad():
                linear.weight_quantizer.scale *= 3
        return {}

    monkeypatch.setattr(ongrid.Gptq, "compensate", spoilt)
    expected, _ = scene()
    layer, replay = scene()
    notes = ongrid.BlockAp(epochs=0, start="gptq").run(layer, replay)
    assert all(note["loss_plain"] < note["loss_start"] for note in notes.values())
    assert same(state(layer), state(expected))


def test_compensated_weights_have_the_codes_of_gptq():
    for grid in (
        GRID,
        "int4.16.sym.bf16",
        "int3.channel.code.fp32",
        "int4.16.sym.[e4m3.2.sym.fp32]",
    ):
        for settings in ({}, {"act_order": False}, {"scales": "mse"}):
            swept, replay = scene(grid=grid)
            ongrid.Gptq(**settings).run(swept, replay)
            kept, replay = scene(grid=grid)
            ongrid.Gptq(**settings).compensate(kept, replay)
            assert all(w.weight_quantizer.latent.dtype == torch.float32 for w in
                       quant_linears(kept).values())  # fmt: skip
            assert same(state(kept), state(swept)), (grid, settings)


# ---- the loss ----------------------------------------------------------------------------------


@each
def test_padding_does_not_count(name: str):
    """Other ids and other targets where the padding is: not a bit of the result changes."""
    results = []
    for filler in (0.0, 50.0):
        layer, replay = scene([toy.padded([5, 12], side="right"), *toy.batches(2)])
        keep = replay.found.keep[0]
        assert keep is not None
        targets = replay.targets(layer)
        assert targets is not None
        targets[0] = torch.where(keep[..., None], targets[0], filler)
        TRAINING[name].run(layer, replay)
        results.append(state(layer))
    assert same(*results)


@pytest.mark.parametrize("index", [0, 2])
def test_it_trains_towards_the_float_chain_from_the_quantized_one(index: int):
    """The first loss that is noted, from executions of our own."""
    layer, replay = scene(index=index)
    twin = toy.build("qwen2").model.layers[index]
    generator = torch.Generator().manual_seed(5)
    floats = [h.clone() for h in replay.hidden]
    for batch in range(len(replay.hidden)):  # the two chains part
        replay.hidden[batch] = floats[batch] + 0.1 * torch.randn(
            floats[batch].shape, generator=generator
        )
    plain = scene(index=index)[0]
    freeze(plain)
    total, count = 0.0, 0
    with torch.no_grad():
        for batch, x in enumerate(floats):
            call = replay.found.calls[index][batch]
            error = call.run(plain, replay.hidden[batch]) - call.run(twin, x)
            total, count = total + float(error.double().square().sum()), count + error.numel()
    notes = ongrid.BlockAp(epochs=0).run(layer, replay)
    # float32 sums of some thousand squares
    assert math.isclose(next(iter(notes.values()))["loss_start"], total / count, rel_tol=1e-5)


# ---- steps -------------------------------------------------------------------------------------


@each
def test_a_loss_that_is_not_finite_names_layer_and_step(name: str, monkeypatch: pytest.MonkeyPatch):
    """And the layer holds the last state whose loss was finite."""
    model = toy.build()
    run, seen = Replay.run, []

    def spoilt(self: Replay, layer: Any, batch: int, hidden: Tensor | None = None) -> Tensor:
        out = run(self, layer, batch, hidden)
        if self.index == 1 and torch.is_grad_enabled():
            seen.append([p.detach().clone() for p in layer.parameters() if p.requires_grad])
            if len(seen) == 4:
                return out * math.nan
        return out

    monkeypatch.setattr(Replay, "run", spoilt)
    with pytest.raises(NonFiniteError, match=r"^model\.layers\.1: .* nan in step 3 of") as caught:
        ongrid.quantize(model, toy.recipe(GRID), toy.batches(4), algorithm=TRAINING[name])
    assert "lower rate" in str(caught.value)
    held = [p for p in model.model.layers[1].parameters() if p.requires_grad]
    assert all(torch.equal(now, then) for now, then in zip(held, seen[2], strict=True))


def test_rates_follow_the_papers_formulas():
    algorithm = ongrid.BlockAp(min_lr_factor=20.0)
    for t in range(11):
        cosine = 1 / 20 + (1 - 1 / 20) * (1 + math.cos(math.pi * t / 10)) / 2
        assert math.isclose(algorithm.rate(t, 10), cosine)
    assert [ongrid.SignRound().rate(t, 4) for t in range(4)] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(("grid", "lr"), [("int2.16.code.fp16", 2e-5), ("int4.16.code.fp16", 1e-5)])
def test_rates_of_the_published_code(grid: str, lr: float, monkeypatch: pytest.MonkeyPatch):
    """Weights and norms 1e-5, or 2e-5 at 2 bits; scales and zeros 1e-4; no weight decay."""
    found: list[torch.optim.Optimizer] = []
    trained = ongrid.BlockAp.trained

    def spied(self: Any, layer: Any, weights: Any) -> Trained:
        result = trained(self, layer, weights)
        found.append(result.optimizer)
        return result

    monkeypatch.setattr(ongrid.BlockAp, "trained", spied)
    layer, replay = scene(grid=grid)
    ongrid.BlockAp(epochs=0).run(layer, replay)
    weights, scales = found[0].param_groups
    assert (weights["lr"], scales["lr"]) == (lr, 1e-4)
    assert weights["weight_decay"] == scales["weight_decay"] == 0.0
    assert len(weights["params"]) == 7 + 2 and len(scales["params"]) == 14
    assert all(p.dtype == torch.float32 for group in (weights, scales) for p in group["params"])


def test_signed_descent_by_hand():
    p = torch.nn.Parameter(torch.tensor([0.0, 0.4, -0.4, 0.1]))
    p.grad = torch.tensor([3.0, -1e-9, 2.0, 0.0])
    SignedDescent([{"params": [p], "lr": 0.25, "bounds": (-0.5, 0.5)}]).step()
    assert p.tolist() == pytest.approx([-0.25, 0.5, -0.5, 0.1])


@each
def test_clipping_bounds_the_gradient(name: str, monkeypatch: pytest.MonkeyPatch):
    clipped: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def spied(parameters: Any, most: float) -> Tensor:
        norm = clip(parameters, most)
        clipped.append(float(sum(p.grad.square().sum() for p in parameters if p.grad is not None)))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spied)
    layer, replay = scene()
    settings = {**vars(TRAINING[name]), "clip": 1e-3}
    type(TRAINING[name])(**settings).run(layer, replay)
    assert clipped and all(square <= 1.0001e-6 for square in clipped)


@each
def test_validation_judges_and_patience_ends_it(name: str):
    """Training at no rate never gets better: it ends after `patience` passes over the others."""
    still = {
        "block_ap": ongrid.BlockAp(epochs=9, weight_lr=0.0, quant_lr=0.0, validation=0.5,
                                   patience=2),
        "signround": ongrid.SignRound(iters=18, lr=0.0, range_lr=0.0, validation=0.5, patience=2),
    }[name]  # fmt: skip
    layer, replay = scene()
    notes = still.run(layer, replay)
    # The first pass is the best so far; the two that follow are not better.
    assert {note["steps"] for note in notes.values()} == {3 * 2}


def test_the_batches_that_judge_are_not_trained_on():
    layer, replay = scene()
    other, changed = scene()
    targets = changed.targets(other)
    assert targets is not None
    targets[3] = targets[3] + 1e-3  # judged alike, by and large
    settings = {"epochs": 1, "weight_lr": 1e-3, "validation": 0.25}
    ongrid.BlockAp(**settings).run(layer, replay)
    ongrid.BlockAp(**settings).run(other, changed)
    assert same(state(layer), state(other))


def test_a_share_that_leaves_nothing_to_train_on_is_refused():
    layer, replay = scene(toy.batches(1))
    with pytest.raises(CalibrationError, match="none of 1 batches"):
        ongrid.BlockAp(validation=0.5).run(layer, replay)


@pytest.mark.parametrize(
    "settings",
    [
        {"clip": 0.0}, {"clip": math.nan}, {"validation": 1.0}, {"validation": -0.1},
        {"patience": -1}, {"patience": 1}, {"epochs": -1}, {"weight_lr": -1.0},
        {"quant_lr": math.inf}, {"min_lr_factor": 0.5}, {"iters": -1}, {"lr": 2.0},
        {"range_lr": math.nan},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]):
    field = next(iter(settings))
    kind = ongrid.SignRound if field in ("iters", "lr", "range_lr") else ongrid.BlockAp
    with pytest.raises(ConfigError, match=field):
        kind(**settings)


CHANGES: dict[str, dict[str, Any]] = {
    "block_ap": {"start": "mse", "clip": 1e-4, "validation": 0.5, "autocast": True,
                 "propagate": "float", "epochs": 1, "weight_lr": 2e-3, "quant_lr": 1e-3,
                 "min_lr_factor": 1.0},
    "signround": {"start": "gptq", "validation": 0.5, "autocast": True,
                  "propagate": "float", "iters": 4, "lr": 0.1, "range_lr": 0.1},
}  # fmt: skip


@pytest.mark.parametrize(("name", "field"), [(n, f) for n, c in CHANGES.items() for f in c])
def test_every_setting_has_an_effect(name: str, field: str):
    """On what a small model becomes. Left out: patience, above; clipping, which a sign ignores."""
    results = []
    for settings in ({}, {field: CHANGES[name][field]}):
        model = toy.build()
        algorithm = type(TRAINING[name])(**{**vars(TRAINING[name]), **settings})
        ongrid.quantize(model, toy.recipe(GRID), toy.batches(4), algorithm=algorithm)
        results.append(model.state_dict())
    assert not same(*results)


# ---- what is left ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_norms_are_in_the_artifact_and_named(dtype: torch.dtype, tmp_path: Path):
    source = toy.save(toy.build(dtype=dtype), tmp_path / "source")
    toy.add_tokenizer(source)
    algorithm = ongrid.BlockAp(weight_lr=3e-3, epochs=3)
    out = tmp_path / "q"
    ongrid.quantize(source, toy.recipe(GRID), toy.batches(4), algorithm=algorithm, out=out)
    norms = [f"model.layers.{i}.{name}_layernorm.weight" for i in range(3)
             for name in ("input", "post_attention")]  # fmt: skip
    assert ongrid.Artifact.open(out).manifest.changed == sorted(norms)
    live = toy.build(dtype=dtype)
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    ongrid.quantize(live, toy.recipe(GRID), toy.batches(4), algorithm=algorithm)
    loaded = ongrid.load(out).state_dict()
    assert same(dict(live.state_dict()), dict(loaded))
    assert any(not torch.equal(loaded[name], before[name]) for name in norms)


@each
def test_layers_and_head_outside(name: str, tmp_path: Path):
    """A head has no layer's output to be trained towards: it is left as the start has it."""
    head = ("lm_head.weight_quantizer", "int8.channel.sym.fp16")
    model = toy.build(tie_word_embeddings=False)
    weight = model.lm_head.weight.detach().clone()
    ongrid.quantize(model, toy.recipe(GRID, head), toy.batches(3), algorithm=TRAINING[name])
    plain = Grid.parse("int8.channel.sym.fp16").quantize(weight)
    assert torch.equal(model.lm_head.weight_quantizer.freeze().parts.codes, plain.codes)


@each
def test_what_a_user_trains_is_not_touched(name: str):
    """Parameters keep their requires_grad and get no gradient; nothing new asks for one."""
    model = toy.build()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    ongrid.quantize(model, toy.recipe(GRID), toy.batches(2), algorithm=TRAINING[name])
    asking = [n for n, p in model.named_parameters() if p.requires_grad]
    assert asking == ["model.layers.0.input_layernorm.weight"]
    assert all(p.grad is None for p in model.parameters())
