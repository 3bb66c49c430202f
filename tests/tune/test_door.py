"""From an artifact to a tuned artifact, and what is kept where something fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ongrid
import toy
from laws.table import assert_same
from ongrid.errors import MergeMismatch, OngridError, Problems, StoreError
from ongrid.export.verify import verify
from ongrid.hf.fresh import __name__ as transformers_process
from ongrid.nn import quant_linears
from ongrid.store.shards import ShardFile, ShardFolder
from ongrid.tune.method import AbstractMethod

METHODS: dict[str, AbstractMethod] = {
    "peqa": ongrid.Peqa(lr=1e-3),
    "qalora": ongrid.QaLora(rank=4, alpha=8.0, scales=True, lr=1e-2),
}
each_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An artifact of a toy model with weights in bf16."""
    folder = toy.save(toy.build(dtype=torch.bfloat16), tmp_path / "source")
    ongrid.quantize(folder, toy.recipe(), out=tmp_path / "q")
    return tmp_path / "q"


def tuned(source: Path, method: AbstractMethod, steps: int = 5) -> Any:
    model: Any = ongrid.load(source)
    ongrid.attach(model, method)
    step(model, method, steps)
    return model.eval()


def step(model: Any, method: AbstractMethod, steps: int) -> None:
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, method, extra_lr=1e-2))
    ids = toy.ids(2, 12)
    for _ in range(steps):
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(toy.ids(1, 9, seed=7)).logits


def contents(folder: Path) -> dict[str, Tensor]:
    stored = ShardFolder(folder)
    return {name: stored.read(name) for name in stored.infos}


@each_method
def test_the_artifact_that_is_written_is_the_model_that_was_trained(
    name: str, source: Path, tmp_path: Path
):
    model = tuned(source, METHODS[name])
    trained = logits(model)
    assert not torch.equal(trained, logits(ongrid.load(source)))
    proof = ongrid.merge(model, tmp_path / "out")
    assert proof.differing == 0 and proof.matrices == len(quant_linears(model))
    assert_same(logits(model), trained)
    assert_same(logits(ongrid.load(tmp_path / "out")), trained)
    shown = verify(tmp_path / "out", fresh_module=transformers_process)
    assert shown.ok and shown.fresh_equals_file == shown.matrices
    before, after = contents(source), contents(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if key.endswith(".codes") or "_quantizer." not in key:
            assert_same(after[key], tensor)
    assert ongrid.Artifact.open(tmp_path / "out").manifest.changed == []


@each_method
def test_trained_norms_are_written_and_named(name: str, source: Path, tmp_path: Path):
    model: Any = ongrid.load(source)
    ongrid.attach(model, METHODS[name])
    model.model.norm.weight.requires_grad_()
    step(model, METHODS[name], 5)
    trained = logits(model)
    ongrid.merge(model, tmp_path / "out")
    assert ongrid.Artifact.open(tmp_path / "out").manifest.changed == ["model.norm.weight"]
    assert_same(logits(ongrid.load(tmp_path / "out")), trained)


@each_method
def test_training_goes_on_from_the_unmerged_state(name: str, source: Path, tmp_path: Path):
    model = tuned(source, METHODS[name])
    trained = logits(model)
    ongrid.merge(model, tmp_path / "out")
    again: Any = ongrid.load(source)
    ongrid.attach(again, METHODS[name], seed=5)
    ongrid.load_state(again, tmp_path / "out.unmerged.safetensors")
    assert_same(logits(again), trained)
    step(again, METHODS[name], 2)
    assert not torch.equal(logits(again), trained)
    ongrid.merge(again, tmp_path / "later")
    assert verify(tmp_path / "later", fresh_process=False).ok


def test_a_tuned_artifact_is_tuned_again(source: Path, tmp_path: Path):
    ongrid.merge(tuned(source, METHODS["qalora"]), tmp_path / "once")
    model = tuned(tmp_path / "once", METHODS["peqa"])
    trained = logits(model)
    ongrid.merge(model, tmp_path / "twice")
    assert_same(logits(ongrid.load(tmp_path / "twice")), trained)


def test_the_state_of_another_method_or_artifact_is_refused_as_a_whole(
    source: Path, tmp_path: Path
):
    model = tuned(source, METHODS["peqa"])
    file = tmp_path / "state.safetensors"
    ongrid.save_state(model, file)
    other: Any = ongrid.load(source)
    ongrid.attach(other, METHODS["qalora"])
    before = {n: p.clone() for n, p in other.named_parameters()}
    with pytest.raises(Problems, match="Attach the same method"):
        ongrid.load_state(other, file)
    assert all(torch.equal(p, before[n]) for n, p in other.named_parameters())
    elsewhere = toy.save(toy.build(seed=3, dtype=torch.bfloat16), tmp_path / "elsewhere")
    ongrid.quantize(elsewhere, toy.recipe(), out=tmp_path / "q2")
    foreign: Any = ongrid.load(tmp_path / "q2")
    ongrid.attach(foreign, METHODS["peqa"])
    with pytest.raises(StoreError, match="other codes"):
        ongrid.load_state(foreign, file)
    with pytest.raises(StoreError, match="no state"):
        shard = next(source.glob("model-*.safetensors"))
        ongrid.load_state(model, shard)
    with pytest.raises(StoreError, match="nothing in this model trains"):
        ongrid.save_state(ongrid.load(source).requires_grad_(False), tmp_path / "none")


def test_folders_that_are_taken_are_refused_before_anything_is_merged(source: Path, tmp_path: Path):
    model = tuned(source, METHODS["peqa"])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("mine")
    for out, what in ((tmp_path / "taken", "not empty"), (source, "that was tuned")):
        with pytest.raises(OngridError, match=what):
            ongrid.merge(model, out)
    assert any(p.requires_grad for p in model.parameters())  # still unmerged
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q", "source", "taken"]
    model.config._name_or_path = ""
    with pytest.raises(StoreError, match="is not known"):
        ongrid.merge(model, tmp_path / "out")
    ongrid.merge(model, tmp_path / "out", source=source)


def test_what_was_trained_is_kept_when_the_proof_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tuned(source, METHODS["peqa"])
    weight = next(iter(quant_linears(model).values())).weight_quantizer
    stored = type(weight).parts

    def spoiled(self: Any) -> Any:
        parts = stored(self)
        if self is weight:
            self.asked = getattr(self, "asked", 0) + 1
            if self.asked > 1:
                return parts._replace(scale=parts.scale * 2)
        return parts

    monkeypatch.setattr(type(weight), "parts", spoiled)
    with pytest.raises(MergeMismatch, match="q_proj"):
        ongrid.merge(model, tmp_path / "out")
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    again: Any = ongrid.load(source)
    ongrid.attach(again, METHODS["peqa"])
    ongrid.load_state(again, tmp_path / "out.unmerged.safetensors")
    assert_same(logits(again), logits(model))


def test_float_parameters_that_do_not_fit_their_stored_dtype_are_refused(
    source: Path, tmp_path: Path
):
    model: Any = ongrid.load(source)
    ongrid.attach(model, METHODS["peqa"])
    model.model.norm.float()
    with torch.no_grad():
        model.model.norm.weight += 1e-4
    with pytest.raises(StoreError, match=r"does not fit the torch\.bfloat16"):
        ongrid.merge(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert any(p.requires_grad for p in model.parameters())  # still unmerged


def test_the_file_of_a_state_holds_what_trains_and_no_codes(source: Path, tmp_path: Path):
    model = tuned(source, METHODS["qalora"])
    ongrid.save_state(model, tmp_path / "state.safetensors")
    stored = ShardFile(tmp_path / "state.safetensors")
    assert {name.rpartition(".")[2] for name in stored.infos} == {"a", "b", "scale"}
    assert json.loads(stored.metadata["ongrid_state"]).keys() == {"codes"}
