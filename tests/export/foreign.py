"""Folders as other tools write them, packed by straight loops that share no code with ongrid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

import toy
from ongrid.export.reader import ForeignLinear
from ongrid.grid import QTensor
from ongrid.store.shards import ShardFolder, write_shard

Tensors = dict[str, Tensor]


@dataclass
class Made:
    """A quantized matrix in plain numbers: codes [out in], zeros [out C], the group of a column."""

    bits: int
    codes: list[list[int]]
    zeros: list[list[int]]
    scales: Tensor
    groups: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), len(self.codes[0])

    def weight(self, dtype: torch.dtype) -> Tensor:
        """(code - zero) * scale in float32, rounded once."""
        right = torch.tensor(self.groups)
        steps = torch.tensor(self.codes) - torch.tensor(self.zeros)[:, right]
        return (steps.float() * self.scales.float()[:, right]).to(dtype)


def make(
    shape: tuple[int, int],
    bits: int = 4,
    group: int = 32,
    *,
    sym: bool = False,
    order: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Made:
    """Random codes, zeros from 0 to the top, scales of a stored dtype; `order` shuffles columns."""
    out, inner = shape
    size = inner if group == -1 else group
    generator = torch.Generator().manual_seed(seed)

    def integers(rows: int, cols: int) -> Tensor:
        found = torch.randint(0, 2**bits, (rows, cols), generator=generator)
        found[0, 0], found[-1, -1] = 2**bits - 1, 0
        return found

    codes, zeros = integers(out, inner), integers(out, inner // size)
    if sym:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    scales = (torch.rand(zeros.shape, generator=generator) / 50 + 0.001).to(dtype)
    groups = torch.arange(inner) // size
    if order:
        groups = groups[torch.randperm(inner, generator=generator)]
    return Made(bits, codes.tolist(), zeros.tolist(), scales, groups.tolist())


def words(numbers: list[int], bits: int) -> list[int]:
    """Numbers as a bit stream in signed 32-bit words: bit k of number i is bit i*bits + k."""
    count = (len(numbers) * bits + 31) // 32
    stream = [0] * count
    for i, number in enumerate(numbers):
        assert 0 <= number < 2**bits
        for k in range(bits):
            if number >> k & 1:
                place = i * bits + k
                stream[place // 32] |= 1 << place % 32
    return [word - 2**32 if word >= 2**31 else word for word in stream]


def turned(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def ints(rows: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


def as_gptq(made: Made, version: int) -> Tensors:
    less = 1 if version == 1 else 0
    stored = [[(z - less) % 2**made.bits for z in row] for row in made.zeros]
    return {
        "qweight": ints(turned([words(row, made.bits) for row in made.codes])),
        "qzeros": ints([words(row, made.bits) for row in turned(stored)]),
        "scales": made.scales.T.contiguous(),
        "g_idx": ints(made.groups),
    }


def as_compressed(made: Made, *, sym: bool = False, order: bool = False) -> Tensors:
    tensors = {
        "weight_packed": ints([words(row, made.bits) for row in made.codes]),
        "weight_scale": made.scales,
        "weight_shape": ints(list(made.shape), torch.int64),
    }
    if not sym:
        packed = [words(column, made.bits) for column in turned(made.zeros)]
        tensors["weight_zero_point"] = ints(turned(packed))
    if order:
        tensors["weight_g_idx"] = ints(made.groups)
    return tensors


def gptq_section(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": False,
        "lm_head": False,
        "checkpoint_format": "gptq_v2",
        "pack_dtype": "int32",
        "true_sequential": True,
        "damp_percent": 0.1,
        "meta": {"quantizer": "tests:1"},
        **changes,
    }


def compressed_section(
    weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        **(weights or {}),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": scheme,
                "input_activations": None,
                "output_activations": None,
                **(group or {}),
            }
        },
        **changes,
    }


@dataclass
class Published:
    """A quantized toy Llama on disk, what its matrices are, and its float tensors."""

    folder: Path
    made: dict[str, Made]
    floats: Tensors
    tensors: Tensors = field(repr=False)

    def write(self) -> None:
        toy.write_tensors(self.tensors, self.folder)

    def reconfigure(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Changes the quantization_config in place."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        change(config["quantization_config"])
        path.write_text(json.dumps(config))

    def copy(self, folder: Path) -> Published:
        shutil.copytree(self.folder, folder)
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return Published(folder, self.made, self.floats, tensors)


def publish(
    folder: Path,
    section: dict[str, Any],
    pack: Callable[[Made], Tensors],
    *,
    dtype: torch.dtype = torch.float16,
    head: bool = False,
    shards: int = 1,
    family: str = "llama",
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> Published:
    """A folder whose decoder linears, and `head` if asked, are quantized; `settings` of `make`."""
    live = toy.build(family, dtype=dtype, num_hidden_layers=2, **(model or {}))
    toy.save(live, folder)
    toy.add_tokenizer(folder)
    (folder / "quantize_config.json").write_text(json.dumps(section))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    stored = ShardFolder(folder)
    floats = {name: stored.read(name) for name in stored.infos}
    made: dict[str, Made] = {}
    tensors: Tensors = {}
    for number, (path, module) in enumerate(live.named_modules()):
        if isinstance(module, torch.nn.Linear | Conv1D) and (head or path != "lm_head"):
            floats.pop(f"{path}.weight", None)
            shape = tuple(module.weight.shape)[:: -1 if isinstance(module, Conv1D) else 1]
            made[path] = make(shape, **{"seed": number, **settings})
            tensors |= {f"{path}.{part}": t for part, t in pack(made[path]).items()}
    published = Published(folder, made, floats, {**floats, **tensors})
    (folder / "model.safetensors").unlink()
    toy.write_tensors(published.tensors, folder, shards=shards)
    return published


def linear(folder: Path, tensors: Tensors, shape: tuple[int, int], **settings: Any) -> Any:
    """One linear on disk, for a reader."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(
        folder / "model.safetensors",
        {f"x.{part}": t.contiguous() for part, t in tensors.items()},
        {},
    )
    names = {part: f"x.{part}" for part in tensors}
    dtype = settings.get("dtype", torch.float16)
    return ForeignLinear("x", "x", shape, dtype, names, ShardFolder(folder))


def assert_is(q: QTensor, made: Made) -> None:
    """That a matrix has exactly these codes, scales (bits and dtype), zeros and groups."""
    assert q.codes.tolist() == made.codes
    scale = q.parts.scale
    assert isinstance(scale, Tensor) and scale.dtype == made.scales.dtype
    assert torch.equal(scale, made.scales)
    zeros = q.parts.zero
    if zeros is None:
        assert all(z == 2 ** (made.bits - 1) for row in made.zeros for z in row)
    else:
        assert zeros.tolist() == made.zeros
    size = len(made.groups) // made.scales.shape[1]
    trivial = made.groups == [i // size for i in range(len(made.groups))]
    assert (q.order is None) == trivial
    assert q.order is None or q.order.tolist() == made.groups
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(q.dequantize(dtype), made.weight(dtype))
