"""Model folders: what is loaded without weights, and what is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ongrid.errors import StoreError
from ongrid.hf import calibration_batches
from ongrid.hf.load import PLAIN, TRANSPOSED, load_hollow, local_folder
from ongrid.nn import find_linears, find_others
from toy import add_tokenizer, build, save, write_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(build("llama"), tmp_path / "m")


def reconfigure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_are_stored_twice_must_be_equal(equal: bool, tmp_path: Path) -> None:
    model = build("llama", tie_word_embeddings=True)
    folder = save(model, tmp_path / "m")
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    head = tensors["model.embed_tokens.weight"].clone()
    head[0, 0] += 0 if equal else 1
    write_tensors({**tensors, "lm_head.weight": head}, folder)
    if equal:
        assert load_hollow(folder).model.lm_head.weight.is_meta
        return
    with pytest.raises(StoreError, match=r"are tied by config\.json and differ in the files") as e:
        load_hollow(folder)
    assert "lm_head.weight" in e.value.what and "model.embed_tokens.weight" in e.value.what
    assert "tie_word_embeddings to false" in e.value.remedy
    reconfigure(folder, tie_word_embeddings=False)
    load_hollow(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "clip"}, "no causal language model"),
        ({"hidden_act": "nope"}, "no causal language model"),
        ({"model_type": "nope"}, "transformers does not know this model"),
        ({"hidden_size": "x"}, "transformers does not know this model"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized already \(gptq\)"),
        ({"quantization_config": []}, r"quantized already \(an unknown method\)"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    reconfigure(folder, **changes)
    with pytest.raises(StoreError, match=message) as caught:
        load_hollow(folder)
    assert caught.value.where == str(folder)


def test_no_quantization_may_be_written_as_null(folder: Path) -> None:
    reconfigure(folder, quantization_config=None)
    load_hollow(folder)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_a_config_that_is_no_object(content: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"config\.json"):
        load_hollow(folder)


def test_a_name_that_no_hub_allows() -> None:
    with pytest.raises(StoreError, match="a b/c d: neither a folder here nor a model on the hub"):
        local_folder("a b/c d")


@pytest.mark.parametrize("content", [None, "{", "{}", "[]"])
def test_a_tokenizer_that_is_missing_or_broken(content: str | None, folder: Path) -> None:
    add_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(StoreError, match="no tokenizer that can be read") as caught:
        calibration_batches(folder, "pydoc", seqlen=8, rows=1)
    assert caught.value.where == str(folder)


def test_linears_of_falcon_are_plain() -> None:
    model = build("falcon")
    sites = find_linears(model, TRANSPOSED, PLAIN)
    assert "transformer.h.0.mlp.dense_h_to_4h" in sites
    others = find_others(model, sites)
    assert not any(path.startswith("transformer.h.") for path in others)


def test_fused_experts_are_no_linears() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=64, num_experts=4, head_dim=16,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = Qwen3MoeForCausalLM(config)
    others = find_others(model, find_linears(model, TRANSPOSED, PLAIN))
    fused = {path: w for path, w in others.items() if len(w.shape) == 3}
    assert {path.rpartition(".")[0] for path in fused} == {"model.layers.0.mlp.experts"}
    assert all("fused experts are not supported yet" in w.why for w in fused.values())
    assert "model.layers.0.mlp.gate.weight" in others
