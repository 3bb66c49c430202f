"""The laws of algorithms, for every line of the table of algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ongrid
import toy
from ongrid._config import from_plain, to_plain
from ongrid.calibrate.capture import capture
from ongrid.calibrate.data import read_calls, run_all
from ongrid.calibrate.replay import Replay
from ongrid.errors import VerifyError
from ongrid.grid import Grid, QTensor
from ongrid.nn import (
    ActivationQuantizer,
    QuantizerSpec,
    QuantLinear,
    find_linears,
    find_stack,
    freeze,
    insert,
    place,
    quant_linears,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = list(ongrid.ALGORITHMS)

# What an algorithm makes small in each row of a weight, by errors `[out in]`, inputs `[tokens in]`.
# A new algorithm writes its own objective here.
Objective = Callable[[Tensor, Tensor], Tensor]
OBJECTIVES: dict[str, Objective] = {
    "rtn": lambda e, x: e.square().sum(1),
    "max": lambda e, x: e.square().sum(1),
    "mse": lambda e, x: e.square().sum(1),
    "gptq": lambda e, x: (e @ x.T).square().sum(1),
}
# These make the error of the layer's output small, whatever becomes of a single weight.
OF_THE_LAYER = {"block_ap", "signround"}
# What trains is told to move far in the few steps that a test has.
SETTINGS: dict[str, dict[str, Any]] = {
    "block_ap": {"weight_lr": 2e-4, "quant_lr": 5e-5, "epochs": 6},
    "signround": {"iters": 40},
}


def settings(name: str) -> Any:
    return ongrid.ALGORITHMS[name](**SETTINGS.get(name, {}))


class Scene:
    """One layer with quantizers in it, its inputs, and what it was before."""

    def __init__(self, name: str, dtype: torch.dtype, grid: str = "int4.16.code.fp16") -> None:
        self.model = toy.build("qwen2", dtype=dtype)
        self.layer: Any = self.model.model.layers[1]
        self.before = {n: (id(p), p.detach().clone()) for n, p in self.layer.named_parameters()}
        self.algorithm = settings(name)
        self.specs = self.wanted(grid)
        insert(self.layer, self.specs, find_linears(self.layer))
        batches = [*toy.batches(2), toy.padded([5, 12], side="left")]
        stack = find_stack(self.model)
        found = capture(self.model, stack, run_all(read_calls(self.model, batches)))
        exact = self.algorithm.needs_targets
        self.replay = Replay(found, self.algorithm.propagate, exact=exact)
        self.replay.enter(1)

    def wanted(self, grid: str) -> dict[str, QuantizerSpec]:
        """The up projection stays float; activations are static where the algorithm can do that."""
        paths = [path for path in find_linears(self.layer) if not path.endswith("up_proj")]
        specs = {f"{path}.weight_quantizer": QuantizerSpec(Grid.parse(grid)) for path in paths}
        specs["mlp.down_proj.weight_quantizer"] = QuantizerSpec(Grid.parse("int8.channel.sym.fp32"))
        specs["self_attn.o_proj.input_quantizer"] = QuantizerSpec(
            Grid.parse("int8.channel.sym.fp32"), dynamic=True
        )
        static = {
            "mlp.down_proj.input_quantizer": QuantizerSpec(Grid.parse("int8.tensor.sym.fp32"))
        }
        return specs if self.algorithm.check(static) else specs | static

    def run(self) -> dict[str, Any]:
        return self.algorithm.run(self.layer, self.replay)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_acts_only_through_weights_and_quantizers(name: str, dtype: torch.dtype):
    """Parameters, inputs and neighbours keep identity and bits, and no hook or gradient stays.
    Float parameters change only where the algorithm says so, and keep their identity.
    """
    scene = Scene(name, dtype)
    inputs = [(h, h.clone()) for h in scene.replay.hidden]
    others = {n: t.clone() for n, t in scene.model.state_dict().items() if ".layers.1." not in n}
    scene.run()
    now = dict(scene.layer.named_parameters())
    trained = scene.algorithm.also_trains(scene.layer)
    assert all(p.grad is None for p in scene.model.parameters())
    quantized = {path for path, m in scene.layer.named_modules() if isinstance(m, QuantLinear)}
    for parameter, (identity, content) in scene.before.items():
        owner, _, leaf = parameter.rpartition(".")
        if owner in quantized and leaf == "weight":
            continue
        assert id(now[parameter]) == identity, parameter
        changed = not torch.equal(now[parameter], content)
        assert changed <= (parameter in trained), parameter
        # In a dtype as coarse as bfloat16 a norm's master may move and the norm stay.
        assert changed == (parameter in trained) or dtype == torch.bfloat16, parameter
    for path, latent in scene.before.items():
        kept = now.get(path.replace(".weight", ".weight_quantizer.latent"))
        assert kept is None or torch.equal(kept, latent[1]) or scene.algorithm.needs_targets
    assert all(h is now_h and torch.equal(h, copy) for now_h, (h, copy) in
               zip(scene.replay.hidden, inputs, strict=True))  # fmt: skip
    assert all(torch.equal(scene.model.state_dict()[n], t) for n, t in others.items())
    for module in scene.layer.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert getattr(module, "bypassed", False) is False


@pytest.mark.parametrize("name", NAMES)
def test_the_same_replay_gives_the_same(name: str):
    results = []
    for _ in range(2):
        scene = Scene(name, torch.float32)
        notes = scene.run()
        freeze(scene.layer)
        results.append((notes, scene.layer.state_dict()))
    (notes, state), (again, other) = results
    assert notes == again
    assert state.keys() == other.keys()
    assert all(torch.equal(tensor, other[n]) for n, tensor in state.items())


@pytest.mark.parametrize("grid", ["int4.16.code.fp16", "int2.32.sym.bf16", "nf4.16.sym.fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_never_worse_than_plain_rounding(name: str, dtype: torch.dtype, grid: str):
    """In its own objective, row by row. Bound: the choice is made in float32, from inputs that a
    second run computes in float32 or that round in the model's dtype alike; 1e-4."""
    if name in OF_THE_LAYER:
        before, after = layer_losses(name, dtype, grid)
        assert after < before
        return
    if name not in OBJECTIVES:
        pytest.fail(f"write the objective of {name} into OBJECTIVES")
    scene = Scene(name, dtype, grid)
    inputs = statistics(scene)
    scene.run()
    for path, q in freeze(scene.layer).items():
        w = scene.before[f"{path}.weight"][1]
        x, objective = inputs[path].double(), OBJECTIVES[name]
        plain = q.grid.decode(q.grid.quantize(w), dtype)
        after = objective(w.double() - q.dequantize(dtype).double(), x)
        before = objective(w.double() - plain.double(), x)
        assert bool((after <= before * (1 + 1e-4)).all()), path


def layer_losses(name: str, dtype: torch.dtype, grid: str) -> list[float]:
    """Mean squared error of the layer's output under plain rounding, and as the algorithm left it;
    over tokens alone, in float64, from an execution of our own.
    """
    exact, plain, done = (Scene(name, dtype, grid) for _ in range(3))
    done.run()
    for linear in quant_linears(exact.layer).values():
        linear.weight_quantizer.bypassed = True
        linear.input_quantizer = None
    twin = {n: m for n, m in done.layer.named_modules() if isinstance(m, ActivationQuantizer)}
    for path, quantizer in twin.items():  # calibrated ranges are not what is compared
        place(plain.layer, path, quantizer)
    losses = []
    for scene in (plain, done):
        total, count = 0.0, 0
        with torch.no_grad():
            for batch, keep in enumerate(scene.replay.found.keep):
                calls = scene.replay.found.calls[1]
                out = calls[batch].run(scene.layer, scene.replay.hidden[batch])
                wanted = calls[batch].run(exact.layer, scene.replay.hidden[batch])
                rows = torch.ones(out.shape[:2], dtype=torch.bool) if keep is None else keep
                error = out[rows].double() - wanted[rows].double()
                total, count = total + float(error.square().sum()), count + error.numel()
        losses.append(total / count)
    return losses


def statistics(scene: Scene) -> dict[str, Tensor]:
    """What each linear multiplies with when weights are float and activations are quantized."""
    twin = Scene("max", scene.layer.input_layernorm.weight.dtype)
    twin.run()
    found: dict[str, list[Tensor]] = {}
    for path, module in list(twin.layer.named_modules()):
        if isinstance(module, QuantLinear):
            module.weight_quantizer.bypassed = True

            def hook(m: QuantLinear, args: Any, path: str = path) -> None:
                x = args[0] if m.input_quantizer is None else m.input_quantizer(args[0])
                found.setdefault(path, []).append(x)

            module.register_forward_pre_hook(hook)
    with torch.no_grad():
        for batch, hidden in enumerate(twin.replay.hidden):
            twin.replay.found.calls[1][batch].run(twin.layer, hidden)
    keeps = [
        k if k is not None else torch.ones(2, 12, dtype=torch.bool) for k in twin.replay.found.keep
    ]
    return {
        path: torch.cat([x[keep] for x, keep in zip(seen, keeps, strict=True)])
        for path, seen in found.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_is_respected(name: str):
    scene = Scene(name, torch.float32)
    notes = scene.run()
    frozen = freeze(scene.layer)
    grids = {
        path: str(module.grid)
        for path, module in scene.layer.named_modules()
        if path.endswith("_quantizer") and module is not None
    }
    assert grids == {path: str(spec.grid) for path, spec in scene.specs.items()}
    assert type(scene.layer.mlp.up_proj) is nn.Linear
    assert {f"{path}.weight_quantizer" for path in frozen} <= set(scene.specs)
    for path, q in frozen.items():
        q.check()
        assert q.grid == scene.specs[f"{path}.weight_quantizer"].grid
    for path, module in scene.layer.named_modules():
        if isinstance(module, ActivationQuantizer):
            assert module.dynamic == scene.specs[path].dynamic
            assert (module.scale is None) == module.dynamic
    # Notes name linears or quantizers, and are what a JSON file holds.
    assert set(notes) <= set(frozen) | set(scene.specs)
    values = [value for note in notes.values() for value in note.values()]
    assert all(type(value) in (int, float, str, bool) for value in values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_runs_in_every_dtype(name: str, dtype: torch.dtype):
    """And what comes out computes: stored parts in their own dtypes, weights in the model's."""
    scene = Scene(name, dtype)
    scene.run()
    for path, q in freeze(scene.layer).items():
        assert q.parts.scale.dtype == q.grid.scale, path
        linear = scene.layer.get_submodule(path)
        assert linear.weight.dtype == dtype
        assert torch.equal(linear.weight, q.dequantize(dtype))
    with torch.no_grad():
        assert bool(torch.isfinite(scene.model(toy.ids(2, 9), use_cache=False).logits).all())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_do(name: str):
    """A layer without quantizers, as a recipe may leave it."""
    scene = Scene(name, torch.float32)
    layer = scene.model.model.layers[0]
    scene.replay.enter(0)
    assert scene.algorithm.run(layer, scene.replay) == {}
    assert not scene.algorithm.needs_inputs({})


@pytest.mark.parametrize("name", NAMES)
def test_settings_survive_the_manifest(name: str):
    algorithm = settings(name)
    plain = to_plain(algorithm, ongrid.ALGORITHMS)
    assert plain["kind"] == name
    assert from_plain(plain, ongrid.ALGORITHMS) == algorithm


@pytest.mark.parametrize("path", ["model.layers.1.mlp.up_proj", "lm_head"])
def test_another_matrix_than_was_frozen_is_an_error(path: str, monkeypatch: pytest.MonkeyPatch):
    """Also where Python runs without asserts."""

    def wrong(root: Any) -> dict[str, QTensor]:
        frozen = freeze(root)
        for name, q in frozen.items():
            if root is model or root is model.model.layers[1]:
                flipped = q.parts.codes.clone()
                flipped[5, 7] ^= 1
                if path.endswith(name):
                    frozen[name] = QTensor(q.grid, q.parts._replace(codes=flipped))
        return frozen

    monkeypatch.setattr("ongrid.calibrate.walk.freeze", wrong)
    model = toy.build()
    recipe = toy.recipe("int4.32.code.fp16", ("lm_head.weight_quantizer", "int8.channel.sym.fp32"))
    with pytest.raises(VerifyError, match="multiplied with another matrix") as caught:
        ongrid.quantize(model, recipe)
    assert caught.value.where == path
