"""The door for quantized models: what another tool wrote is what is verified, loaded and tuned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ongrid
import toy
from export.foreign import (
    Published,
    as_compressed,
    as_gptq,
    assert_is,
    compressed_section,
    gptq_section,
    make,
    publish,
)
from ongrid.adopt import FLOAT_IN_SOURCE
from ongrid.cli.app import app
from ongrid.errors import ConfigError, OngridError, Problems, StoreError
from ongrid.export.reader import READERS
from ongrid.export.verify import verify
from ongrid.hf.fresh import __name__ as transformers_process
from ongrid.hf.load import PLAIN, TRANSPOSED
from ongrid.nn import find_linears, find_stack, quant_linears
from ongrid.recipe import Recipe
from ongrid.store.artifact import Artifact

Publish = Callable[[Path], Published]

FOLDERS: dict[str, Publish] = {
    "gptq": lambda f: publish(
        f, gptq_section(checkpoint_format="gptq"), lambda m: as_gptq(m, 1), shards=3
    ),
    "gptq_v2 bf16": lambda f: publish(
        f,
        gptq_section(bits=3),
        lambda m: as_gptq(m, 2),
        bits=3,
        dtype=torch.bfloat16,
    ),
    "gptq sym channel": lambda f: publish(
        f,
        gptq_section(bits=8, sym=True, group_size=-1),
        lambda m: as_gptq(m, 2),
        bits=8,
        group=-1,
        sym=True,
    ),
    "gptq desc_act": lambda f: publish(
        f, gptq_section(desc_act=True), lambda m: as_gptq(m, 2), order=True
    ),
    "gptq head": lambda f: publish(
        f,
        gptq_section(lm_head=True),
        lambda m: as_gptq(m, 2),
        head=True,
        model={"tie_word_embeddings": True},
    ),
    "compressed-tensors": lambda f: publish(
        f, compressed_section(), as_compressed, dtype=torch.bfloat16
    ),
    "compressed-tensors sym": lambda f: publish(
        f,
        compressed_section({"symmetric": True, "num_bits": 8}),
        lambda m: as_compressed(m, sym=True),
        bits=8,
        sym=True,
    ),
    "compressed-tensors actorder": lambda f: publish(
        f,
        compressed_section({"actorder": "group"}),
        lambda m: as_compressed(m, order=True),
        order=True,
    ),
}
each = pytest.mark.parametrize("name", FOLDERS)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Published]:
    root = tmp_path_factory.mktemp("published")
    return {name: make(root / name) for name, make in FOLDERS.items()}


@pytest.fixture
def source(pristine: dict[str, Published], tmp_path: Path) -> Published:
    """A plain GPTQ folder, to be spoilt."""
    return pristine["gptq sym channel"].copy(tmp_path / "source")


def ids() -> torch.Tensor:
    return toy.ids(2, 12)


def test_every_reader_is_tried() -> None:
    assert {name.split()[0].removesuffix("_v2") for name in FOLDERS} == set(READERS)


@each
def test_the_artifact_holds_what_the_folder_held(
    name: str, pristine: dict[str, Published], tmp_path: Path
) -> None:
    made, out = pristine[name], tmp_path / "out"
    artifact = ongrid.adopt(made.folder, out)
    assert artifact.complete
    found = dict(artifact.stream())
    assert found.keys() == made.made.keys()
    for path, q in found.items():
        assert_is(q, made.made[path])
    stored = artifact.tensors()
    for tensor, original in made.floats.items():
        assert stored.infos[tensor].dtype == original.dtype
        assert torch.equal(stored.read(tensor), original), tensor
    rest = {n for n in stored.infos if ".weight_quantizer." not in n}
    assert rest == made.floats.keys()
    for side in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (made.folder / side).exists():
            assert (out / side).read_bytes() == (made.folder / side).read_bytes()
    # It speaks of tensors that are gone.
    assert (out / "quantize_config.json").exists() == name.startswith("compressed")


@each
def test_it_is_proved_and_served(name: str, pristine: dict[str, Published], tmp_path: Path) -> None:
    made, out = pristine[name], tmp_path / "out"
    ongrid.adopt(made.folder, out)
    shown = verify(out, fresh_module=transformers_process)
    assert shown.ok, "\n".join(shown.lines())
    assert shown.matrices == shown.fresh_equals_file == len(made.made)
    model = ongrid.load(out)
    linears = quant_linears(model)
    assert linears.keys() == made.made.keys()
    for path, linear in linears.items():
        expected = made.made[path].weight(linear.weight.dtype)
        assert torch.equal(linear.weight, expected), path


@each
def test_logits_are_those_of_the_float_model_with_these_matrices(
    name: str, pristine: dict[str, Published], tmp_path: Path
) -> None:
    made, out = pristine[name], tmp_path / "out"
    ongrid.adopt(made.folder, out)
    served: Any = ongrid.load(out)
    dtype = served.dtype
    weights = {f"{path}.weight": m.weight(dtype) for path, m in made.made.items()}
    config = json.loads((made.folder / "config.json").read_text())
    untied = "lm_head" in made.made
    plain: Any = toy.build(dtype=dtype, num_hidden_layers=2, tie_word_embeddings=False)
    floats = dict(made.floats)
    assert untied == config["tie_word_embeddings"]
    plain.load_state_dict({**floats, **weights})
    with torch.no_grad():
        assert torch.equal(served(ids()).logits, plain(ids()).logits)
    assert served.config.tie_word_embeddings is False


@each
def test_training_starts_from_it(name: str, pristine: dict[str, Published], tmp_path: Path) -> None:
    ongrid.adopt(pristine[name].folder, tmp_path / "out")
    model: Any = ongrid.load(tmp_path / "out")
    method = ongrid.Peqa(lr=1e-2)
    with torch.no_grad():
        before = model(ids()).logits
        ongrid.attach(model, method)
        assert torch.equal(model(ids()).logits, before)
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, method))
    model.train()(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    with torch.no_grad():
        trained = model.eval()(ids()).logits
    assert not torch.equal(trained, before)
    proof = ongrid.merge(model, tmp_path / "tuned")
    assert proof.differing == 0 and proof.matrices == len(pristine[name].made)
    with torch.no_grad():
        again: Any = ongrid.load(tmp_path / "tuned")
        assert torch.equal(again(ids()).logits, trained)


def test_zeros_train_as_well(pristine: dict[str, Published], tmp_path: Path) -> None:
    ongrid.adopt(pristine["gptq desc_act"].folder, tmp_path / "out")
    model: Any = ongrid.load(tmp_path / "out")
    method = ongrid.QaLora(rank=4, alpha=8.0, lr=1e-1)
    ongrid.attach(model, method)
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, method))
    for _ in range(3):
        model.train()(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
    ongrid.merge(model.eval(), tmp_path / "tuned")
    assert verify(tmp_path / "tuned", fresh_process=False).ok


# ---- the manifest -------------------------------------------------------------------------------


@each
def test_the_manifest_says_where_it_comes_from(
    name: str, pristine: dict[str, Published], tmp_path: Path
) -> None:
    made = pristine[name]
    manifest = ongrid.adopt(made.folder, tmp_path / "out").manifest
    section = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    assert manifest.algorithm == {"kind": "adopted", "format": section["quant_method"]}
    assert manifest.fingerprint["config"]["quantization_config"] == section
    assert manifest.segments == ["layer-00000", "layer-00001", "rest"]
    if "lm_head" not in made.made:
        assert manifest.kept == {"lm_head": FLOAT_IN_SOURCE}
    # The recipe, applied to the float model, asks for just these grids.
    model = toy.build(num_hidden_layers=2)
    sites = find_linears(model, TRANSPOSED, PLAIN)
    plan = Recipe.load(manifest.recipe).resolve(sites, find_stack(model))
    asked = {path.rpartition(".")[0]: str(s.grid) for path, s in plan.quantizers.items()}
    assert asked == {path: entry["grid"] for path, entry in manifest.matrices.items()}
    assert len(manifest.recipe["rules"]) == 7 + ("lm_head" in made.made)


def test_rules_are_single_where_layers_differ(tmp_path: Path) -> None:
    made = publish(tmp_path / "source", compressed_section(), as_compressed)
    left_float = "model.layers.1.mlp.up_proj"
    for part in ("packed", "scale", "zero_point", "shape"):
        del made.tensors[f"{left_float}.weight_{part}"]
    made.tensors[f"{left_float}.weight"] = torch.ones(96, 64, dtype=torch.float16)
    made.write()
    manifest = ongrid.adopt(made.folder, tmp_path / "out").manifest
    matches = {rule["match"] for rule in manifest.recipe["rules"]}
    assert "model.layers.0.mlp.up_proj.weight_quantizer" in matches
    assert "model.layers.*.mlp.down_proj.weight_quantizer" in matches
    assert manifest.kept[left_float] == FLOAT_IN_SOURCE
    assert verify(tmp_path / "out", fresh_process=False).ok
    assert left_float not in quant_linears(ongrid.load(tmp_path / "out"))


def test_several_schemes_are_several_grids(tmp_path: Path) -> None:
    section = compressed_section()
    group = section["config_groups"]["group_0"]
    channel = {**group["weights"], "num_bits": 8, "strategy": "channel", "group_size": None}
    section["config_groups"]["group_1"] = {
        **group,
        "targets": ["re:.*down_proj"],
        "weights": channel,
    }
    made = publish(tmp_path / "source", section, as_compressed)
    for path, found in made.made.items():
        if path.endswith("down_proj"):
            made.made[path] = make(found.shape, 8, -1, seed=5)
            parts = as_compressed(made.made[path])
            made.tensors |= {f"{path}.{part}": tensor for part, tensor in parts.items()}
    made.write()
    artifact = ongrid.adopt(made.folder, tmp_path / "out")
    for path, q in artifact.stream():
        assert_is(q, made.made[path])
    grids = {entry["grid"] for entry in artifact.manifest.matrices.values()}
    assert grids == {"int4.32.code.fp16", "int8.channel.code.fp16"}


def test_a_bias_of_zeros_travels_along_and_another_is_refused(
    source: Published, tmp_path: Path
) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    source.tensors[bias] = torch.zeros(64, dtype=torch.float16)
    source.write()
    artifact = ongrid.adopt(source.folder, tmp_path / "out")
    assert artifact.infos("rest")[bias].shape == (64,)
    assert verify(tmp_path / "out", fresh_process=False).ok
    assert ongrid.load(tmp_path / "out")(ids()).logits.isfinite().all()
    source.tensors[bias][3] = 1
    source.write()
    with pytest.raises(StoreError, match="q_proj: has a tensor 'bias'"):
        ongrid.adopt(source.folder, tmp_path / "other")


def test_a_model_with_biases_keeps_them(tmp_path: Path) -> None:
    made = publish(
        tmp_path / "source",
        gptq_section(),
        lambda m: as_gptq(m, 2),
        model={"attention_bias": True},
    )
    ongrid.adopt(made.folder, tmp_path / "out")
    model: Any = ongrid.load(tmp_path / "out")
    name = "model.layers.1.self_attn.v_proj"
    assert torch.equal(model.get_submodule(name).bias, made.floats[f"{name}.bias"])


def test_linears_that_the_model_keeps_turned_and_names_without_their_prefix(
    tmp_path: Path,
) -> None:
    """GPT-2: its class keeps weights [in out], and its files were written by the base model."""
    made = publish(tmp_path / "source", gptq_section(), lambda m: as_gptq(m, 2), family="gpt2")
    prefix = "transformer."
    assert all(name.startswith(prefix) for name in made.tensors)
    made.tensors = {name.removeprefix(prefix): t for name, t in made.tensors.items()}
    made.write()
    artifact = ongrid.adopt(made.folder, tmp_path / "out")
    for path, q in artifact.stream():
        assert_is(q, made.made[path])
        assert artifact.manifest.matrices[path]["transposed"]
    assert len(artifact.manifest.matrices) == 8
    stored = artifact.tensors()
    for name, original in made.floats.items():
        assert torch.equal(stored.read(name), original), name
    assert verify(tmp_path / "out", fresh_module=transformers_process).ok


# ---- resuming, and the folder -------------------------------------------------------------------


def test_a_stopped_run_goes_on(
    pristine: dict[str, Published], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pristine["gptq"].folder
    ongrid.adopt(folder, tmp_path / "whole")
    write, written = Artifact.write, []

    def fails_at_the_second(self: Artifact, segment: str, *more: Any) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(segment)
        write(self, segment, *more)

    monkeypatch.setattr(Artifact, "write", fails_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        ongrid.adopt(folder, tmp_path / "out")
    assert not (tmp_path / "out/config.json").exists()
    first = (tmp_path / "out/model-layer-00000.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(Artifact, "write", write)
    ongrid.adopt(folder, tmp_path / "out")
    assert (tmp_path / "out/model-layer-00000.safetensors").stat().st_mtime_ns == first
    assert toy.contents(tmp_path / "out") == toy.contents(tmp_path / "whole")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    ongrid.adopt(folder, tmp_path / "out")
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}


def test_another_source_is_not_taken_for_the_same(
    pristine: dict[str, Published], tmp_path: Path
) -> None:
    ongrid.adopt(pristine["gptq"].folder, tmp_path / "out")
    with pytest.raises(OngridError, match="was begun with"):
        ongrid.adopt(pristine["compressed-tensors"].folder, tmp_path / "out")
    ongrid.adopt(pristine["compressed-tensors"].folder, tmp_path / "out", overwrite=True)
    assert verify(tmp_path / "out", fresh_process=False).ok


def test_the_source_is_not_the_output(source: Published) -> None:
    before = toy.contents(source.folder)
    with pytest.raises(OngridError, match="the model's own folder"):
        ongrid.adopt(source.folder, source.folder, overwrite=True)
    assert toy.contents(source.folder) == before


def test_peak_memory_of_a_segment_is_one_layer(
    pristine: dict[str, Published], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of a layer is read while another is written."""
    from ongrid.store.shards import ShardFile

    log: list[str] = []
    read, write = ShardFile.read, Artifact.write

    def reading(self: ShardFile, name: str) -> Any:
        if self.path.parent == pristine["gptq"].folder:
            log.append(name)
        return read(self, name)

    def writing(self: Artifact, segment: str, *more: Any) -> None:
        log.append(segment)
        write(self, segment, *more)

    begin = Artifact.begin

    def beginning(*args: Any, **more: Any) -> Artifact:
        log.clear()
        return begin(*args, **more)

    monkeypatch.setattr(ShardFile, "read", reading)
    monkeypatch.setattr(Artifact, "write", writing)
    monkeypatch.setattr(Artifact, "begin", staticmethod(beginning))
    ongrid.adopt(pristine["gptq"].folder, tmp_path / "out")
    for index in (0, 1):
        end = log.index(f"layer-{index:05d}")
        before = [n for n in log[:end] if not n.startswith("layer-")]
        assert before and all(n.startswith(f"model.layers.{index}.") for n in before)
        del log[: end + 1]
    assert log.pop() == "rest"
    assert not any(n.startswith("model.layers.") for n in log)


def test_the_command(pristine: dict[str, Published], tmp_path: Path) -> None:
    arguments = ["adopt", str(pristine["gptq"].folder), str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "14 on int4.32.code.fp16" in result.output
    assert f"wrote {tmp_path}/out" in result.output.replace("\n", "")
    inspected = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")], catch_exceptions=False)
    assert "adopted(format=gptq)" in inspected.output


# ---- what is refused ----------------------------------------------------------------------------


def refusal(folder: Path, out: Path) -> OngridError:
    """The error, and that nothing was written."""
    with pytest.raises(OngridError) as caught:
        ongrid.adopt(folder, out)
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "fp8", "auto-round", "ongrid"])
def test_other_methods(method: str, source: Published, tmp_path: Path) -> None:
    source.reconfigure(lambda section: section.update(quant_method=method))
    error = refusal(source.folder, tmp_path / "out")
    assert isinstance(error, ConfigError)
    assert f"quant_method '{method}' cannot be adopted" in error.what
    assert "gptq, compressed-tensors" in error.remedy


def test_no_quantization_at_all(tmp_path: Path) -> None:
    folder = toy.save(toy.build(), tmp_path / "m")
    error = refusal(folder, tmp_path / "out")
    assert "no quantization_config" in error.what
    assert "quantize_config.json" in error.remedy


def test_a_missing_folder_and_a_folder_without_config(tmp_path: Path) -> None:
    refusal(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in str(refusal(tmp_path / "empty", tmp_path / "out"))


def test_everything_is_said_at_once(source: Published, tmp_path: Path) -> None:
    """Missing parts, scales below zero, a lost norm and a taken folder: one error each."""
    layers = [f"model.layers.{i}" for i in (0, 1)]
    for layer in layers:
        del source.tensors[f"{layer}.mlp.up_proj.qzeros"]
        source.tensors[f"{layer}.self_attn.q_proj.scales"][0, 5] = -1
        source.tensors[f"{layer}.self_attn.k_proj.scales"][0, 5] = 0
    del source.tensors["model.norm.weight"]
    source.write()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("kept")
    with pytest.raises(Problems) as caught:
        ongrid.adopt(source.folder, tmp_path / "out")
    problems = caught.value.problems
    assert len(problems) == 4, caught.value
    text = str(caught.value)
    assert "not empty: mine" in text
    assert "1 parameters are not in the files" in text and "model.norm.weight" in text
    both = "model.layers.0.mlp.up_proj, model.layers.1.mlp.up_proj: has no qzeros"
    assert both in text
    scales = next(p for p in problems if "scales that are negative" in p.what)
    assert scales.where.count(",") == 2 and scales.where.endswith(" and 1 more")
    assert all(p.remedy for p in problems)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_config_and_files_are_judged_together(source: Published, tmp_path: Path) -> None:
    source.reconfigure(lambda section: section.update(checkpoint_format="marlin"))
    file = source.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    text = str(refusal(source.folder, tmp_path / "out"))
    assert "marlin" in text and "is truncated" in text


def test_truncated_and_lying_files(pristine: dict[str, Published], tmp_path: Path) -> None:
    for name in ("cut", "lies", "lost", "empty"):
        shutil.copytree(pristine["gptq"].folder, tmp_path / name)
    file = tmp_path / "cut/model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "is truncated" in str(refusal(tmp_path / "cut", tmp_path / "out"))
    index = tmp_path / "lies/model.safetensors.index.json"
    plain = json.loads(index.read_text())
    moved = next(n for n in plain["weight_map"] if n.endswith("qzeros"))
    plain["weight_map"][moved] = "model-00003-of-00003.safetensors"
    plain["weight_map"]["model.layers.7.up.qweight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(plain))
    assert "by this index" in str(refusal(tmp_path / "lies", tmp_path / "out"))
    (tmp_path / "lost/model-00001-of-00003.safetensors").unlink()
    assert "not in the folder" in str(refusal(tmp_path / "lost", tmp_path / "out"))
    (tmp_path / "empty/model-00001-of-00003.safetensors").write_bytes(b"")
    assert "breaks off" in str(refusal(tmp_path / "empty", tmp_path / "out"))


def test_matrices_without_a_place(source: Published, tmp_path: Path) -> None:
    for path in ("model.embed_tokens", "model.layers.0.mlp.experts", "nowhere"):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            linear = f"model.layers.0.mlp.up_proj.{part}"
            source.tensors[f"{path}.{part}"] = source.tensors[linear]
    source.write()
    error = refusal(source.folder, tmp_path / "out")
    assert "is no linear layer of this model" in error.what
    assert error.where == "model.embed_tokens, model.layers.0.mlp.experts, nowhere"


def test_a_linear_that_is_there_twice_or_not_at_all(source: Published, tmp_path: Path) -> None:
    up = "model.layers.0.mlp.up_proj"
    source.tensors[f"{up}.weight"] = torch.ones(96, 64, dtype=torch.float16)
    source.write()
    assert f"{up}: has a tensor 'weight'" in str(refusal(source.folder, tmp_path / "out"))
    for part in ("weight", "qweight", "qzeros", "scales", "g_idx"):
        del source.tensors[f"{up}.{part}"]
    source.write()
    text = str(refusal(source.folder, tmp_path / "out"))
    assert f"1 parameters are not in the files under their names: {up}.weight" in text
    assert "live model" not in text


def test_strange_tensors_of_a_linear(source: Published, tmp_path: Path) -> None:
    source.tensors["model.layers.0.mlp.up_proj.lora_A"] = torch.ones(4, 64)
    source.write()
    assert "'lora_A'" in str(refusal(source.folder, tmp_path / "out"))


def test_another_models_config(source: Published, tmp_path: Path) -> None:
    path = source.folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "intermediate_size": 128}))
    text = str(refusal(source.folder, tmp_path / "out"))
    assert "qweight is int32" in text and "down_proj" in text


def test_a_config_that_quantizes_and_files_that_do_not(tmp_path: Path) -> None:
    folder = toy.save(toy.build(), tmp_path / "m")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": gptq_section()}))
    assert "no linear is quantized" in str(refusal(folder, tmp_path / "out"))


def test_other_shapes_outside_of_linears(source: Published, tmp_path: Path) -> None:
    source.tensors["model.norm.weight"] = torch.ones(65, dtype=torch.float16)
    source.write()
    assert "the file has shape [65]" in str(refusal(source.folder, tmp_path / "out"))


def test_quantize_points_here(source: Published, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="quantized already") as caught:
        ongrid.quantize(source.folder, toy.recipe(), out=tmp_path / "out")
    assert "ongrid adopt" in caught.value.remedy
