"""Memory: one layer at a time, whatever the depth, and nothing of it afterwards."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ongrid
import toy
from ongrid.calibrate.capture import capture
from ongrid.calibrate.data import read_calls, run_all
from ongrid.errors import Problems
from ongrid.hf.load import load_hollow
from ongrid.nn import find_stack
from ongrid.quantize import Progress
from ongrid.store.paging import LiveSource, ShardSource
from ongrid.store.shards import ShardFolder


def test_layers_come_and_go(tmp_path: Path):
    model = toy.build(tie_word_embeddings=True)
    hollow = load_hollow(toy.save(model, tmp_path / "m", shards=3))
    names = {name: id(p) for name, p in hollow.model.named_parameters()}
    assert all(p.is_meta for p in hollow.model.parameters())
    assert not any(b.is_meta for b in hollow.model.buffers())
    hollow.source.page_in("model.layers.1")
    for name, parameter in hollow.model.named_parameters():
        assert parameter.is_meta is not name.startswith("model.layers.1.")
        if not parameter.is_meta:
            assert torch.equal(parameter, model.get_parameter(name))
    hollow.source.page_out("model.layers.1")
    assert all(p.is_meta for p in hollow.model.parameters())
    assert hollow.model.lm_head.weight is hollow.model.model.embed_tokens.weight
    hollow.source.page_in("")
    assert hollow.model.lm_head.weight is hollow.model.model.embed_tokens.weight
    assert {n for n, _ in hollow.model.named_parameters()} == set(names)
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in hollow.model.named_parameters())


def test_capture_pages_the_head_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No decoder layer is read, nor what comes behind them, and the head goes out again."""
    hollow = load_hollow(toy.save(toy.build(tie_word_embeddings=False), tmp_path / "m"))
    read: list[str] = []
    ordinary = ShardSource._load
    monkeypatch.setattr(
        ShardSource, "_load", lambda self, name, p: (read.append(name), ordinary(self, name, p))[1]
    )
    stack = find_stack(hollow.model)
    with hollow.source.on_demand(stack.path):
        capture(hollow.model, stack, run_all(read_calls(hollow.model, toy.batches(3))))
        assert not hollow.model.model.embed_tokens.weight.is_meta
    assert read == ["model.embed_tokens.weight"]
    assert all(p.is_meta for p in hollow.model.parameters())
    assert not any(m._forward_pre_hooks for m in hollow.model.modules())


@pytest.mark.parametrize("algorithm", ["rtn", "mse", "gptq", "gptq:propagate=float", "max"])
def test_a_finished_layer_is_gone(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its modules, old and new, are dead before the next one is read."""
    folder = toy.save(toy.build(num_hidden_layers=4), tmp_path / "m")
    seen: list[Any] = []
    ordinary = ShardSource.page_in

    def page_in(self: ShardSource, path: str) -> None:
        gc.collect()
        assert [ref().__class__.__name__ for ref in seen if ref() is not None] == [], path
        ordinary(self, path)
        if path.startswith("model.layers."):
            seen.extend(weakref.ref(m) for m in self.model.get_submodule(path).modules())

    monkeypatch.setattr(ShardSource, "page_in", page_in)
    rules = [("*.layers.*.input_quantizer", "int8.tensor.sym.fp32")] if algorithm != "rtn" else []
    recipe = toy.recipe("int4.32.code.fp16", *rules)
    ongrid.quantize(folder, recipe, toy.batches(2), algorithm=algorithm, out=tmp_path / "q")
    assert len(seen) == 4 * len(list(toy.build().model.layers[0].modules()))


def test_capture_holds_no_layer_afterwards(tmp_path: Path):
    """Not even until circles are collected, where it had to look for the output form."""
    hollow = load_hollow(toy.save(toy.build("falcon"), tmp_path / "m"))
    stack = find_stack(hollow.model)
    calls = read_calls(hollow.model, toy.batches(2))
    gc.collect()
    gc.disable()
    try:
        with hollow.source.on_demand(stack.path):
            found = capture(hollow.model, stack, run_all(calls))
        assert found.form
        layers = [weakref.ref(layer) for layer in stack.layers(hollow.model)]
        for path in stack.paths:
            hollow.source.drop(path)
        assert [ref() for ref in layers] == [None] * 3
    finally:
        gc.enable()


def test_a_module_on_demand_brings_its_own_tensors_alone(tmp_path: Path):
    """A parent with a tensor of its own is no reason to read its children."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.zeros(4), requires_grad=False)
            self.called, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.own.is_meta and self.called.weight.is_meta
            y = self.called(x) + self.own + self.shift
            assert self.idle.weight.is_meta
            return y

    model = Outer()
    stored = {name: torch.randn(t.shape) for name, t in model.state_dict().items()}
    toy.write_tensors(stored, tmp_path)
    for name, parameter in list(model.named_parameters()):
        parent = model.get_submodule(name.rpartition(".")[0])
        hollow = nn.Parameter(parameter.to("meta"), requires_grad=False)
        parent._parameters[name.rpartition(".")[2]] = hollow
    source = ShardSource(model, ShardFolder(tmp_path), {name: name for name in stored})
    x = torch.randn(2, 4)
    with source.on_demand("layers"):
        y = model(x)
    expected = nn.functional.linear(x, stored["called.weight"], stored["called.bias"])
    assert torch.equal(y, expected + stored["own"] + stored["shift"])
    assert all(p.is_meta for p in model.parameters())


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach and that are not frozen, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and not found.is_meta:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.alone
@pytest.mark.slow
def test_memory_does_not_grow_with_depth(tmp_path: Path):
    """S5: the peak over a run of 12 layers is that over 4, to within a tenth of a layer."""
    peaks = {4: 0, 12: 0}
    for depth in (4, 12):
        folder = toy.save(toy.build(num_hidden_layers=depth), tmp_path / str(depth))
        data = toy.batches(2)

        def watch(progress: Progress, depth: int = depth) -> None:
            peaks[depth] = max(peaks[depth], live_bytes())

        gc.collect()
        gc.freeze()  # what is there before does not count, and need not be looked through
        try:
            ongrid.quantize(
                folder, toy.recipe(), data, algorithm="gptq",
                out=tmp_path / f"q{depth}", on_progress=watch,
            )  # fmt: skip
        finally:
            gc.unfreeze()
    layer = sum(p.numel() * 4 for p in toy.build().model.layers[0].parameters())
    assert peaks[4] > layer
    assert abs(peaks[12] - peaks[4]) < layer / 10


def test_a_model_in_memory_is_its_own_source():
    model = toy.build()
    source = LiveSource(model)
    parameters = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    for act in (source.page_in, source.page_out, source.drop):
        act("model.layers.1")
    with source.on_demand("model.layers"):
        pass
    assert list(source.surplus()) == []
    for name, parameter in model.named_parameters():
        assert id(parameter) == parameters[name][0]
        assert torch.equal(parameter, parameters[name][1])
        assert source.original(name, parameter) is parameter


@pytest.mark.parametrize("live", [True, False])
def test_the_digest_is_of_every_weight(live: bool, tmp_path: Path):
    """Any bit of any tensor, and nothing else."""

    def digest(model: Any, name: str) -> str:
        if live:
            return LiveSource(model).digest()
        return load_hollow(toy.save(model, tmp_path / name)).source.digest()

    first = digest(toy.build(), "a")
    assert digest(toy.build(), "b") == first
    for number, path in enumerate(["lm_head.weight", "model.layers.2.mlp.up_proj.weight"]):
        model = toy.build()
        flat = model.get_parameter(path).data.view(-1)
        flat[5] = torch.nextafter(flat[5], torch.tensor(9.0))
        assert digest(model, f"other{number}") != first


def test_names_of_a_base_model_s_file(tmp_path: Path):
    """Files of a base model lack the prefix that the whole model's names have."""
    model = toy.build("gpt2")
    folder = toy.save(model, tmp_path / "m")
    tensors = {n.removeprefix("transformer."): p.detach() for n, p in model.named_parameters()}
    toy.write_tensors(tensors, folder)
    artifact = ongrid.quantize(folder, toy.recipe(), out=tmp_path / "q")
    whole = ongrid.quantize(toy.save(model, tmp_path / "w"), toy.recipe(), out=tmp_path / "qw")
    for path, q in artifact.stream():
        assert q.compare(whole.matrix(path)).total == 0
    assert artifact.tensors().infos.keys() == whole.tensors().infos.keys()


def test_config_and_weights_of_different_models(tmp_path: Path):
    folder = toy.save(toy.build(), tmp_path / "m")
    toy.build(intermediate_size=128).config.save_pretrained(folder)
    with pytest.raises(
        Problems, match=r"file has shape \[96, 64\], the model needs \[128, 64\]"
    ) as e:
        load_hollow(folder)
    assert len(e.value.problems) == 9
