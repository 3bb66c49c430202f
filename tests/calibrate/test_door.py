"""`ongrid.quantize`: what is true of the door, whatever lies behind it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ongrid
import ongrid.hf
import toy
from ongrid.nn import quant_linears


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {path: linear.weight for path, linear in quant_linears(model).items()}


def test_a_model_cast_after_loading_is_served_in_the_dtype_it_was_calibrated_in(tmp_path: Path):
    model = toy.build("llama", dtype=torch.float32)
    assert model.config.dtype in (None, torch.float32)
    model = model.bfloat16()
    ongrid.quantize(model, toy.recipe(), out=tmp_path / "q")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    mine, served = weights(model), weights(loaded)
    assert mine.keys() == served.keys()
    for path, weight in mine.items():
        assert weight.dtype == served[path].dtype == torch.bfloat16
        assert torch.equal(weight, served[path]), path


def test_a_live_model_and_a_complete_artifact_give_the_quantized_model(tmp_path: Path):
    first = ongrid.quantize(toy.build("llama"), toy.recipe(), out=tmp_path / "q")
    again = ongrid.quantize(toy.build("llama"), toy.recipe(), out=tmp_path / "q")
    assert isinstance(first, torch.nn.Module)
    assert isinstance(again, torch.nn.Module)
    assert weights(again)
    for path, weight in weights(first).items():
        assert torch.equal(weight, weights(again)[path]), path


def test_mixed_dtypes_are_refused_before_anything_is_written(tmp_path: Path):
    model = toy.build("llama")
    model.model.layers[1].mlp.bfloat16()
    with pytest.raises(ongrid.StructureError, match="several dtypes"):
        ongrid.quantize(model, toy.recipe(), out=tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_quantized_model_is_refused_before_data_is_read(tmp_path: Path):
    def unread():
        raise AssertionError("the data was read")
        yield

    model = ongrid.quantize(toy.build("llama"), toy.recipe())
    with pytest.raises(ongrid.StructureError, match="quantized already"):
        ongrid.quantize(model, toy.recipe(), unread(), algorithm="gptq", out=tmp_path / "q")


def test_another_config_of_the_same_weights_is_another_run(tmp_path: Path):
    toy.save(toy.build("llama"), tmp_path / "source")
    ongrid.quantize(tmp_path / "source", toy.recipe(), out=tmp_path / "q")
    config = json.loads((tmp_path / "source/config.json").read_bytes())
    (tmp_path / "source/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(ongrid.ResumeError, match=r"config\.rms_norm_eps .*, now 0\.5"):
        ongrid.quantize(tmp_path / "source", toy.recipe(), out=tmp_path / "q")


def test_the_version_is_the_packages():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["version"] == ongrid.__version__
