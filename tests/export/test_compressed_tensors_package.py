"""The package compressed-tensors as the foreign packer, and as the foreign reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import (
    ModelCompressor,
    PackedQuantizationCompressor,
    pack_to_int32,
)
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams, is_module_quantized
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import ongrid
import toy
from export.foreign import Made, as_compressed, assert_is, compressed_section, linear, make
from ongrid.export.reader import open_reader
from ongrid.export.verify import verify
from ongrid.nn import quant_linears


def packed_by_the_package(made: Made, *, sym: bool) -> dict[str, Tensor]:
    """The package's own packing of a matrix, from its signed numbers."""
    middle = 2 ** (made.bits - 1)
    signed = (torch.tensor(made.codes) - middle).to(torch.int8)
    zeros = (torch.tensor(made.zeros) - middle).to(torch.int8)
    tensors = {
        "weight_packed": pack_to_int32(signed, made.bits),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(made.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = pack_to_int32(zeros, made.bits, packed_dim=0)
    return tensors


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("bits", range(2, 9))
def test_the_package_packs_as_the_loops_do_and_reads_what_we_read(
    bits: int, group: int, sym: bool, tmp_path: Path
) -> None:
    made = make((12, 64), bits, group, sym=sym, dtype=torch.float32)
    tensors = packed_by_the_package(made, sym=sym)
    by_loops = as_compressed(made, sym=sym)
    assert tensors.keys() == by_loops.keys()
    for name, tensor in by_loops.items():
        assert torch.equal(tensors[name], tensor), name
    kind: dict[str, Any] = {"num_bits": bits, "symmetric": sym}
    kind |= {"strategy": "channel", "group_size": None} if group == -1 else {}
    section = compressed_section(kind)
    ct = open_reader(section)
    found = linear(tmp_path, tensors, made.shape)
    ct.check(found)
    assert_is(ct.read(found), made)
    weights = section["config_groups"]["group_0"]["weights"]
    del weights["block_structure"], weights["actorder"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    theirs = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    assert torch.equal(theirs, ct.read(found).dequantize(torch.float32))


def saved_by_the_package(folder: Path, args: dict[str, Any]) -> None:
    """A toy Llama in bf16, quantized to the range of its weights and saved by the package."""
    live = toy.build(dtype=torch.bfloat16, num_hidden_layers=2)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(live, config)
    weights: Any = scheme.weights
    for module in live.modules():
        if not is_module_quantized(module):
            continue
        w = module.weight.data
        columns = weights.group_size if weights.strategy == "group" else w.shape[1]
        blocks = w.reshape(w.shape[0], -1, columns).float()
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights)
        module.weight_scale.data = scale.to(torch.bfloat16)
        if not weights.symmetric:
            module.weight_zero_point.data = zero.to(torch.int8)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor: Any = ModelCompressor.from_pretrained_model(live)
    compressor.compress_model(live)
    folder.mkdir()
    live.config.save_pretrained(folder)
    toy.write_tensors(live.state_dict(), folder)
    compressor.update_config(str(folder))


# transformers says that the folder's own settings win over those that are passed: so they should.
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize(
    "args",
    [
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": True},
        {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False},
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
    ],
    ids=str,
)
def test_a_folder_that_the_package_saved_serves_the_packages_matrices(
    args: dict[str, Any], tmp_path: Path
) -> None:
    saved_by_the_package(tmp_path / "source", args)
    ongrid.adopt(tmp_path / "source", tmp_path / "out")
    assert verify(tmp_path / "out", fresh_process=False).ok
    # The default load of an asymmetric folder fails in the package; dequantized at once it loads.
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source",
        dtype="auto",
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    for path, ours in quant_linears(ongrid.load(tmp_path / "out")).items():
        # With scales in bf16 the package computes in bf16: an exact product, rounded once.
        assert torch.equal(theirs.get_submodule(path).weight, ours.weight), path
