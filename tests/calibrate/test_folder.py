"""The folder that a run leaves: all of the source is accounted for, nothing is there twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor

import ongrid
import toy
from ongrid.calibrate.algorithm import parse_algorithm
from ongrid.errors import StoreError
from ongrid.grid import Grid, QTensor, unpack

HEAD = ("lm_head.weight_quantizer", "int8.channel.sym.fp16")


def everything(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the safetensors package."""
    found: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in found, f"{name} stands twice"
                found[name] = file.get_tensor(name)
    return found


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def tensors_of(path: str, w: Tensor, grid: str) -> dict[str, Tensor]:
    """What a plainly rounded matrix is stored in."""
    q = QTensor.rounded(Grid.parse(grid), w)
    return {f"{path}.weight_quantizer.{name}": tensor for name, tensor in q.tensors().items()}


# ---- T10 -------------------------------------------------------------------------------------

SIDE_FILES = {
    "generation_config.json": b'{"do_sample": false, "temperature": 0.6}',
    "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}\n",
    "preprocessor_config.json": b'{"size": 3}',
    "modeling_toy.py": b"raise ImportError('never imported')\n",
    "README.md": b"# Toy\r\n",
    "special.tiktoken": bytes(range(256)),
}
WEIGHT_FILES = ("pytorch_model.bin", "old.gguf", "tf_model.h5", "pytorch_model.bin.index.json")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three shards with an index, side files, and a tensor that the model has no place for."""
    folder = tmp_path / "m"
    model = toy.build(dtype=torch.bfloat16, tie_word_embeddings=False)
    toy.save(model, folder)
    (folder / "model.safetensors").unlink()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # Norms are kept in float32 in this file, and the model computes with them in bfloat16.
    state = {n: t.float() if n.endswith("layernorm.weight") else t for n, t in state.items()}
    state["model.mtp.proj.weight"] = torch.randn(8, 8, dtype=torch.float16)
    state["model.mtp.steps"] = torch.arange(5)
    toy.write_tensors(state, folder, shards=3)
    toy.add_tokenizer(folder)
    for name, content in {**SIDE_FILES, **dict.fromkeys(WEIGHT_FILES, b"old")}.items():
        (folder / name).write_bytes(content)
    (folder / ".hidden").write_bytes(b"secret")
    (folder / "runs").mkdir()
    return folder


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_everything_of_the_source_is_accounted_for(algorithm: str, source: Path, tmp_path: Path):
    out = tmp_path / "q"
    artifact = ongrid.quantize(source, toy.recipe(), toy.batches(1), algorithm=algorithm, out=out)
    before, after = everything(source), everything(out)
    quantized = set(artifact.manifest.matrices)
    assert len(quantized) == 21
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        if module in quantized:
            assert name not in after
            parts = {n for n in after if n.startswith(f"{module}.")}
            assert parts == {f"{module}.weight_quantizer.{p}" for p in ("codes", "scale", "zero")}
        else:
            assert same(after[name], tensor), name
    assert same(after["model.mtp.steps"], torch.arange(5))
    assert after["model.layers.0.input_layernorm.weight"].dtype == torch.float32
    kept = {n for n in after if "_quantizer." not in n}
    assert kept == {n for n in before if n.removesuffix(".weight") not in quantized}


def test_index_and_headers_agree(source: Path, tmp_path: Path):
    out = tmp_path / "q"
    ongrid.quantize(source, toy.recipe(), out=out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held: dict[str, str] = {}
    for shard in out.glob("*.safetensors"):
        with safetensors.safe_open(shard, "pt") as file:
            assert file.metadata()["format"] == "pt"
            held |= dict.fromkeys(file.keys(), shard.name)
    assert index["weight_map"] == held
    total = sum(t.nbytes for t in everything(out).values())
    assert index["metadata"]["total_size"] == total
    assert {Path(name).suffix for name in index["weight_map"].values()} == {".safetensors"}


def test_side_files_are_copied_byte_for_byte(source: Path, tmp_path: Path):
    out = tmp_path / "q"
    ongrid.quantize(source, toy.recipe(), out=out)
    before, after = toy.contents(source), toy.contents(out)
    for name in [*SIDE_FILES, "tokenizer.json", "tokenizer_config.json"]:
        assert after[name] == before[name], name
    assert not set(after) & {*WEIGHT_FILES, ".hidden"}
    written = {"config.json", "ongrid.json", "model.safetensors.index.json"}
    unexpected = {n for n in set(after) - set(before) - written if not n.startswith("model-")}
    assert unexpected == set()


def test_chat_and_tokens_are_those_of_the_source(source: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    ongrid.quantize(source, toy.recipe(), out=tmp_path / "q")
    chat = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}]
    a, b = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "q"))
    assert a.apply_chat_template(chat, tokenize=False) == b.apply_chat_template(
        chat, tokenize=False
    )
    assert a("w3 w4")["input_ids"] == b("w3 w4")["input_ids"] == [3, 4]


def test_the_config_is_the_source_s_and_says_what_was_done(source: Path, tmp_path: Path):
    ongrid.quantize(source, toy.recipe(), out=tmp_path / "q")
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "q")
    )
    assert after.pop("quantization_config")["quant_method"] == "ongrid"
    assert after == before


def test_overwriting_leaves_nothing_stale(source: Path, tmp_path: Path):
    fresh = tmp_path / "fresh"
    ongrid.quantize(source, toy.recipe(), out=fresh)
    out = tmp_path / "q"
    out.mkdir()
    stale = ["model-00001-of-00009.safetensors", "model.safetensors.index.json", "config.json"]
    for name in [*stale, "tokenizer.model", "notes.txt"]:
        (out / name).write_bytes(b"stale")
    with pytest.raises(StoreError, match=r"output folder is not empty: config\.json"):
        ongrid.quantize(source, toy.recipe(), out=out)
    assert (out / "model-00001-of-00009.safetensors").read_bytes() == b"stale"
    ongrid.quantize(source, toy.recipe(), out=out, overwrite=True)
    assert toy.contents(out) == toy.contents(fresh)


def test_overwriting_an_artifact_of_other_conditions(source: Path, tmp_path: Path):
    fresh, out = tmp_path / "fresh", tmp_path / "q"
    ongrid.quantize(source, toy.recipe(), out=fresh)
    ongrid.quantize(source, toy.recipe("int8.channel.sym.fp16"), out=out)
    ongrid.quantize(source, toy.recipe(), out=out, overwrite=True)
    assert toy.contents(out) == toy.contents(fresh)


# ---- tied weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("twice", [False, True], ids=["stored once", "stored twice"])
@pytest.mark.parametrize("live", [False, True])
def test_tied_and_neither_end_targeted(live: bool, twice: bool, tmp_path: Path):
    """T04: one copy, bit-identical, and the config still says tied."""
    model = toy.build(tie_word_embeddings=True)
    folder = toy.save(model, tmp_path / "m")
    embedding = model.model.embed_tokens.weight.detach().clone()
    if twice:
        tensors = everything(folder)
        toy.write_tensors({**tensors, "lm_head.weight": embedding}, folder)
    out = tmp_path / "q"
    ongrid.quantize(model if live else folder, toy.recipe(), out=out)
    after = everything(out)
    assert same(after["model.embed_tokens.weight"], embedding)
    assert not any(name.startswith("lm_head") for name in after)
    assert (
        sum(t.numel() == embedding.numel() and t.dtype == torch.float32 for t in after.values())
        == 1
    )
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_quantized_alone(tied: bool, live: bool, tmp_path: Path):
    """The embedding stays as it was, and the config says that the two are no longer one."""
    model = toy.build(tie_word_embeddings=tied)
    folder = toy.save(model, tmp_path / "m")
    embedding = model.model.embed_tokens.weight.detach().clone()
    head = model.lm_head.weight.detach().clone()
    assert torch.equal(head, embedding) is tied
    out = tmp_path / "q"
    ongrid.quantize(model if live else folder, toy.recipe("int4.32.code.fp16", HEAD), out=out)
    after = everything(out)
    assert same(after["model.embed_tokens.weight"], embedding)
    assert "lm_head.weight" not in after
    for name, tensor in tensors_of("lm_head", head, HEAD[1]).items():
        assert same(after[name], tensor), name
    if live:
        assert torch.equal(model.model.embed_tokens.weight, embedding)
        assert not torch.equal(model.lm_head.weight, embedding)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("propagate", ["quantized", "float"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_calibrated_on_what_it_is_fed(tied: bool, propagate: str, tmp_path: Path):
    """Its codes are those of GPTQ on the inputs that a plain forward of the rest gives it."""
    batches = [*toy.batches(2), toy.padded([4, 9], side="right", seed=5)]
    algorithm = f"gptq:propagate={propagate}"
    folder = toy.save(toy.build(tie_word_embeddings=tied), tmp_path / "m")
    recipe = toy.recipe("int4.32.code.fp16", (HEAD[0], "int4.16.sym.fp16"))
    artifact = ongrid.quantize(folder, recipe, batches, algorithm=algorithm, out=tmp_path / "q")
    rest = toy.build(tie_word_embeddings=tied)
    w = rest.lm_head.weight.detach().clone()
    if propagate == "quantized":
        ongrid.quantize(rest, toy.recipe(), batches, algorithm=algorithm)
    inputs = toy.fed(rest, "lm_head", lambda: [rest(**b, use_cache=False) for b in batches])
    masks = [b.get("attention_mask", torch.ones_like(b["input_ids"])).bool() for b in batches]
    expected = gptq_alone(w, [x[mask] for x, mask in zip(inputs, masks, strict=True)])
    stored = artifact.matrix("lm_head")
    # The statistics are summed batch by batch on both sides, from equal inputs: equality is exact.
    assert stored.compare(expected).total == 0
    assert stored.compare(QTensor.rounded(stored.grid, w)).codes > 0
    notes = artifact.records()["rest"]["notes"]
    assert notes["lm_head"]["tokens"] == 48 + 13


def gptq_alone(w: Tensor, inputs: list[Tensor]) -> QTensor:
    from ongrid.calibrate.capture import Call, Capture
    from ongrid.calibrate.chain import Chain
    from ongrid.calibrate.replay import Replay
    from ongrid.nn import QuantizerSpec, find_linears, freeze, insert

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
            self.proj.weight.data.copy_(w)

        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states + self.proj(hidden_states).sum()

    layer = Layer()
    spec = QuantizerSpec(Grid.parse("int4.16.sym.fp16"))
    insert(layer, {"proj.weight_quantizer": spec}, find_linears(layer))
    calls = [[Call((), {}, True) for _ in inputs]]
    replay = Replay(
        Capture(Chain([x[None] for x in inputs]), calls, [None] * len(inputs)), "quantized"
    )
    parse_algorithm("gptq").run(layer, replay)
    return freeze(layer)["proj"]


# ---- live and disk ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", ["rtn", "mse", "gptq", "max"])
def test_live_and_disk_give_equal_tensors(algorithm: str, dtype: torch.dtype, tmp_path: Path):
    model = toy.build(dtype=dtype)
    folder = toy.save(model, tmp_path / "m", shards=3)
    rules = [HEAD]
    if algorithm != "rtn":
        rules.append(("*.layers.*.input_quantizer", "int8.tensor.sym.fp32"))
    recipe, data = toy.recipe("int4.32.code.fp16", *rules), toy.batches(2)
    ongrid.quantize(folder, recipe, data, algorithm=algorithm, out=tmp_path / "disk")
    ongrid.quantize(model, recipe, data, algorithm=algorithm, out=tmp_path / "live")
    disk, live = everything(tmp_path / "disk"), everything(tmp_path / "live")
    assert disk.keys() == live.keys()
    assert all(same(tensor, live[name]) for name, tensor in disk.items())
    state = model.state_dict()
    assert state.keys() >= disk.keys()
    assert all(same(tensor, state[name]) for name, tensor in disk.items())
    used = {**ongrid.Artifact.open(tmp_path / "live").records()}
    assert {p for record in used.values() for p in record["used"]} == {
        path for path, _ in ongrid.Artifact.open(tmp_path / "disk").stream()
    }


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_families(family: str, tmp_path: Path):
    """Every kind of model walks from disk as it does in memory, and keeps what has no grid."""
    model = toy.build(family, dtype=torch.bfloat16)
    folder = toy.save(model, tmp_path / "m", shards=2)
    recipe, data = (
        toy.recipe("int4.32.code.fp16"),
        [*toy.batches(1), toy.padded([4, 9], side="left")],
    )
    artifact = ongrid.quantize(folder, recipe, data, algorithm="gptq", out=tmp_path / "disk")
    ongrid.quantize(model, recipe, data, algorithm="gptq", out=tmp_path / "live")
    disk, live = everything(tmp_path / "disk"), everything(tmp_path / "live")
    assert disk.keys() == live.keys()
    assert all(same(tensor, live[name]) for name, tensor in disk.items())
    before = everything(folder)
    for name, tensor in disk.items():
        if "_quantizer." not in name:
            assert same(tensor, before[name]), name
    # An independent decoder: codes and zeros are bytes, and the number is (q - z) * s.
    for path, q in artifact.stream():
        tensors = {n: disk[f"{path}.weight_quantizer.{n}"] for n in ("codes", "scale", "zero")}
        packed = tensors["codes"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        assert torch.equal(codes, unpack(packed, 4, q.shape[1]))
        z, s = (tensors[n].float().repeat_interleave(32, 1) for n in ("zero", "scale"))
        weight: Any = model.get_submodule(path).weight
        assert torch.equal(((codes.float() - z) * s).bfloat16(), weight)
