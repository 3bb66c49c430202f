"""An artifact through `from_pretrained`: the loaded model is the quantized one, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ongrid
import ongrid.hf
from ongrid.errors import OngridError
from ongrid.hf import load_model
from ongrid.nn import QuantLinear, quant_linears
from ongrid.store.artifact import Artifact
from toy import FAMILIES, add_tokenizer, build, save

IDS = torch.arange(48).reshape(2, 24) % 90 + 3
W8A8 = {
    "rules": [
        {"match": "*.weight_quantizer", "grid": "int8.channel.sym.fp32"},
        {"match": "*.input_quantizer", "grid": "int8.tensor.code.fp32"},
        {"match": "<outside>", "grid": None},
    ]
}
GROUPED = {
    "rules": [
        {"match": "*.weight_quantizer", "grid": "int4.32.code.fp16"},
        {"match": "<outside>", "grid": None},
    ]
}


def quantized(
    folder: Path, out: Path, recipe: object = GROUPED, algorithm: str = "rtn"
) -> Artifact:
    artifact = ongrid.quantize(folder, recipe, [IDS], algorithm=algorithm, out=out)
    assert isinstance(artifact, Artifact)
    return artifact


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loaded_model_is_the_live_quantized_model(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save(build(family, dtype=dtype), tmp_path / "source")
    live = load_model(tmp_path / "source")
    quantized(tmp_path / "source", tmp_path / "q")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype="auto").eval()
    ongrid.quantize(live, GROUPED)
    paths = quant_linears(live).keys()
    assert paths == quant_linears(loaded).keys()
    assert paths
    for path in paths:
        mine, other = live.get_submodule(path), loaded.get_submodule(path)
        assert torch.equal(mine.weight, other.weight), path
        assert mine.weight.dtype == dtype
    assert torch.equal(logits(live), logits(loaded))


@pytest.mark.parametrize("recipe", [GROUPED, W8A8, "nvfp4_weight"], ids=["int4", "w8a8", "nvfp4"])
def test_stored_tensors_load_with_their_own_dtypes(recipe: object, tmp_path: Path) -> None:
    save(build("llama", dtype=torch.bfloat16), tmp_path / "source")
    artifact = quantized(tmp_path / "source", tmp_path / "q", recipe, "max")
    stored = artifact.tensors()
    for asked in ("auto", torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=asked)
        state = model.state_dict()
        names = [name for name in stored.infos if "_quantizer." in name]
        assert names
        for name in names:
            assert state[name].dtype == stored.infos[name].dtype, name
            assert torch.equal(state[name], stored.read(name)), name


def test_fresh_process_gives_the_same_logits(tmp_path: Path) -> None:
    save(build("llama", dtype=torch.bfloat16), tmp_path / "source")
    quantized(tmp_path / "source", tmp_path / "q", algorithm="gptq")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype="auto").eval()
    torch.save({"ids": IDS, "logits": logits(model)}, tmp_path / "expected.pt")
    code = (
        "import sys, torch, ongrid.hf\n"
        "from transformers import AutoModelForCausalLM\n"
        "torch.set_num_threads(int(sys.argv[3]))\n"
        "want = torch.load(sys.argv[2])\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='auto').eval()\n"
        "with torch.no_grad():\n"
        "    got = model(input_ids=want['ids'], use_cache=False).logits\n"
        "assert torch.equal(got, want['logits'])\n"
    )
    threads = str(torch.get_num_threads())
    arguments = [str(tmp_path / "q"), str(tmp_path / "expected.pt"), threads]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_saving_a_loaded_model_again_keeps_every_bit(tmp_path: Path) -> None:
    save(build("llama", dtype=torch.bfloat16), tmp_path / "source")
    quantized(tmp_path / "source", tmp_path / "q")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype="auto").eval()
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto").eval()
    assert torch.equal(logits(model), logits(again))


def test_tied_embeddings_share_one_storage_after_reload(tmp_path: Path) -> None:
    """T04: neither end is quantized."""
    live = build("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    save(live, tmp_path / "source")
    artifact = quantized(tmp_path / "source", tmp_path / "q")
    embedding = live.get_input_embeddings().weight
    names = [n for n, i in artifact.tensors().infos.items() if i.shape == tuple(embedding.shape)]
    assert names == ["model.embed_tokens.weight"]
    assert torch.equal(artifact.tensors().read(names[0]), embedding)
    assert json.loads((tmp_path / "q/config.json").read_text())["tie_word_embeddings"] is True
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype="auto")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("tied", [True, False])
def test_quantized_head(tied: bool, tmp_path: Path) -> None:
    """A tied head that is quantized alone is untied, and the embedding stays as it was."""
    recipe = {
        "rules": [
            {"match": "*.weight_quantizer", "grid": "int4.32.code.fp16"},
            {"match": "lm_head.weight_quantizer", "grid": "int8.channel.sym.fp16"},
        ]
    }
    live = build("llama", dtype=torch.bfloat16, tie_word_embeddings=tied)
    save(live, tmp_path / "source")
    embedding = live.get_input_embeddings().weight.clone()
    artifact = quantized(tmp_path / "source", tmp_path / "q", recipe, "gptq")
    assert json.loads((tmp_path / "q/config.json").read_text())["tie_word_embeddings"] is False
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype="auto").eval()
    assert isinstance(loaded.lm_head, QuantLinear)
    assert torch.equal(loaded.get_input_embeddings().weight, embedding)
    head = artifact.matrix("lm_head").dequantize(torch.bfloat16)
    assert torch.equal(loaded.lm_head.weight, head)
    assert torch.isfinite(logits(loaded)).all()


def test_chat_tokenizer_and_generation_config_travel(tmp_path: Path) -> None:
    """T10: side files byte for byte, an odd generation config too, and the rendered chat equal."""
    save(build("llama", dtype=torch.bfloat16), tmp_path / "source")
    add_tokenizer(tmp_path / "source")
    odd = '{"do_sample": false, "temperature": 0.6}\n'
    (tmp_path / "source/generation_config.json").write_text(odd)
    quantized(tmp_path / "source", tmp_path / "q")
    assert (tmp_path / "q/generation_config.json").read_text() == odd
    chat = [{"role": "user", "content": "w5 w6"}]
    rendered = [
        AutoTokenizer.from_pretrained(tmp_path / name).apply_chat_template(chat, tokenize=False)
        for name in ("source", "q")
    ]
    assert rendered[0] == rendered[1]
    assert "w5" in rendered[0]


@pytest.mark.parametrize("damage", ["missing", "dtype", "shape"])
def test_tensors_that_do_not_fit_the_config_are_refused(damage: str, tmp_path: Path) -> None:
    """The loader by itself only warns, and computes with whatever memory there was."""
    save(build("llama", dtype=torch.bfloat16), tmp_path / "source")
    artifact = quantized(tmp_path / "source", tmp_path / "q")
    segment = "layer-00000"
    file = artifact.folder / f"model-{segment}.safetensors"
    from ongrid.store.shards import ShardFile

    shard = ShardFile(file)
    tensors = {name: shard.read(name) for name in shard.infos}
    name = "model.layers.0.mlp.up_proj.weight_quantizer.scale"
    if damage == "missing":
        del tensors[name]
    elif damage == "dtype":
        tensors[name] = tensors[name].float()
    else:
        tensors[name] = tensors[name][:-1].clone()
    artifact.write(segment, tensors, {})
    with pytest.raises(OngridError, match=r"up_proj\.weight_quantizer\.scale"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype="auto")


def test_an_incomplete_artifact_is_no_model(tmp_path: Path) -> None:
    save(build("llama", dtype=torch.bfloat16), tmp_path / "source")
    artifact = quantized(tmp_path / "source", tmp_path / "q")
    (artifact.folder / "config.json").unlink()
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    with pytest.raises(OngridError, match="not complete"):
        Artifact.open(tmp_path / "q")


def test_future_versions_are_refused(tmp_path: Path) -> None:
    save(build("llama", dtype=torch.bfloat16), tmp_path / "source")
    quantized(tmp_path / "source", tmp_path / "q")
    path = tmp_path / "q/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["version"] = 99
    path.write_text(json.dumps(config))
    with pytest.raises(OngridError, match="version 99"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "q")
