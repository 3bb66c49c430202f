"""Ranges: rounding, the search for a smaller range, and static activations, against brute force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ongrid
import toy
from ongrid.calibrate.algorithm import parse_algorithm
from ongrid.calibrate.capture import Call, Capture
from ongrid.calibrate.chain import Chain
from ongrid.calibrate.ranges import calibrate_activations
from ongrid.calibrate.replay import Replay
from ongrid.errors import CalibrationError, ConfigError, GridError
from ongrid.grid import Grid, QTensor
from ongrid.nn import QuantizerSpec, find_linears, freeze, insert

STORED = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def skewed(rows: int, cols: int) -> Tensor:
    """Weights with a few large ones, so that clipping pays in some blocks and not in others."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(rows, cols, generator=generator)
    return w * torch.exp(1.2 * torch.randn(rows, cols, generator=generator)) * 0.05


class One(nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.proj = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
        self.spare = nn.Linear(w.shape[1], w.shape[1])
        with torch.no_grad():
            self.proj.weight.copy_(w)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.proj(hidden_states).sum(-1, keepdim=True)


def quantized(w: Tensor, grid: str, algorithm: str) -> tuple[QTensor, dict[str, Any]]:
    layer = One(w)
    insert(layer, {"proj.weight_quantizer": QuantizerSpec(Grid.parse(grid))}, find_linears(layer))
    notes = parse_algorithm(algorithm).run(layer, Replay(Capture(), "float"))
    return freeze(layer)["proj"], notes


def candidate(block: Tensor, factor: float, grid: str) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, zero and numbers of one block under a part of its range, from the definitions."""
    bits, zero, stored = int(grid[3]), ".code." in grid, STORED[grid.rpartition(".")[2]]
    half = 2 ** (bits - 1)
    lo, hi = factor * block.min().clamp(max=0), factor * block.max().clamp(min=0)
    if zero:
        s = ((hi - lo) / (2 * half - 1)).to(stored).float()
        z = (-lo / s).round().clamp(0, 2 * half - 1)
        return s, z, (((block / s).round() + z).clamp(0, 2 * half - 1) - z) * s
    s = torch.maximum(hi / (half - 1), lo / -half).to(stored).float()
    return s, torch.zeros(()), (block / s).round().clamp(-half, half - 1) * s


@pytest.mark.parametrize("grid", ["int4.16.sym.fp16", "int4.16.code.fp16", "int3.16.sym.bf16"])
@pytest.mark.parametrize("algorithm", ["rtn", "max"])
def test_plain_rounding(grid: str, algorithm: str):
    w = skewed(8, 64)
    q, notes = quantized(w, grid, algorithm)
    assert notes == {}
    for row in range(8):
        for group in range(4):
            block = w[row, 16 * group : 16 * group + 16]
            s, _, numbers = candidate(block, 1.0, grid)
            assert q.grid.scales(q.parts.scale)[row, group] == s
            found = q.dequantize(torch.float32)[row, 16 * group : 16 * group + 16]
            assert torch.equal(found, numbers)


@pytest.mark.parametrize("grid", ["int4.16.sym.fp16", "int3.16.code.fp16", "int2.16.code.fp32"])
def test_mse_is_the_best_of_its_candidates(grid: str):
    """Errors are summed in float32 over 16 numbers: a candidate may be taken for another whose
    error is within 1e-5 of it."""
    w = skewed(8, 64)
    q, _ = quantized(w, grid, "mse:shrink=0.5,steps=11")
    taken = set()
    for row in range(8):
        for group in range(4):
            here = slice(16 * group, 16 * group + 16)
            block, found = w[row, here], q.dequantize(torch.float32)[row, here]
            tried = [candidate(block, 1 - 0.05 * step, grid) for step in range(11)]
            errors = [float((numbers - block).double().square().sum()) for _, _, numbers in tried]
            error = float((found - block).double().square().sum())
            assert error <= min(errors) * (1 + 1e-5)
            scale = q.grid.scales(q.parts.scale)[row, group]
            taken.add([bool(torch.isclose(s, scale, rtol=1e-6)) for s, _, _ in tried].index(True))
    assert len(taken) > 2  # the whole range is not always the best, nor is one part of it


GRIDS = [
    "int4.16.sym.fp16", "int2.32.code.fp16", "uint3.16.shift.bf16", "nf4.16.sym.fp32",
    "int4.channel.sym.fp16", "int3.tensor.code.fp32", "int3.4x16.sym.fp16", "e2m1.16.sym.fp16",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", GRIDS)
def test_mse_is_never_worse_than_rounding_in_any_block(grid: str, dtype: torch.dtype):
    """Bound: float32 sums over a block against float64, 1e-5."""
    w = skewed(16, 64).to(dtype)
    errors = []
    for algorithm in ("rtn", "mse"):
        q, _ = quantized(w, grid, algorithm)
        q.check()
        e = (q.dequantize(dtype).double() - w.double()).square()
        rows, cols = q.grid.blocks.counts((16, 64))
        errors.append(e.reshape(rows, 16 // rows, cols, 64 // cols).sum((1, 3)))
    assert bool((errors[1] <= errors[0] * (1 + 1e-5)).all())
    assert float(errors[1].sum()) < float(errors[0].sum())


def test_scales_on_a_grid_of_their_own_follow_from_the_weights():
    w = skewed(16, 64)
    for grid in ("e2m1.16.sym.[e4m3.tensor.sym.fp32]", "e2m1.32.sym.[e8m0.channel.sym.one]"):
        searched, _ = quantized(w, grid, "mse")
        assert searched.compare(quantized(w, grid, "rtn")[0]).total == 0


def test_blocks_that_vanish_are_reported():
    """A group so small that its fp16 scale would be 0 becomes zeros, and is counted."""
    w = skewed(8, 64)
    w[1, :16], w[2, 16:32] = 1e-9, 0.0
    for algorithm in ("rtn", "max", "mse"):
        q, notes = quantized(w, "int4.16.sym.fp16", algorithm)
        assert notes == {"proj": {"underflowed_blocks": 1}}
        assert not q.dequantize(torch.float32)[1, :16].any()


# ---- static activations ----------------------------------------------------------------------


def brute_force(model: Any, path: str, batches: list[dict[str, Tensor]], *, out: bool) -> Tensor:
    """All numbers that enter (or leave) a linear in plain forwards, padding left out."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append((output if out else args[0]).clone())

    handle = model.get_submodule(path).register_forward_hook(hook)
    with torch.no_grad():
        for batch in batches:
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            model(**batch, position_ids=positions, use_cache=False)
    handle.remove()
    masks = [b.get("attention_mask", torch.ones_like(b["input_ids"])).bool() for b in batches]
    return torch.cat([x[mask].flatten() for x, mask in zip(seen, masks, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["max", "mse"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_static_ranges(side: str, algorithm: str, dtype: torch.dtype, tmp_path: Path):
    """Exact: the least and the greatest of all real tokens, of the float model, in every layer."""
    model = toy.build(dtype=dtype)
    with torch.no_grad():
        # Padding is all but real: it would widen every range if it were counted.
        model.model.embed_tokens.weight[2] = 50.0
    batches = [*toy.batches(2), toy.padded([4, 9, 12], side=side, seed=5)]
    grids = {"input": "int8.tensor.sym.fp32", "output": "int8.tensor.code.fp32"}
    rules = [(f"*.layers.*.{kind}_quantizer", grid) for kind, grid in grids.items()]
    sites = [path for path in find_linears(model) if path != "lm_head"]
    numbers = {
        (path, kind): brute_force(model, path, batches, out=kind == "output")
        for path in sites
        for kind in grids
    }
    ongrid.quantize(
        model, toy.recipe("int8.channel.sym.fp32", *rules), batches, algorithm=algorithm,
        out=tmp_path / "q",
    )  # fmt: skip
    artifact = ongrid.Artifact.open(tmp_path / "q")
    notes = {p: n for record in artifact.records().values() for p, n in record["notes"].items()}
    stored = artifact.tensors()
    for (path, kind), seen in numbers.items():
        quantizer = f"{path}.{kind}_quantizer"
        lo, hi = seen.min().float(), seen.max().float()
        assert notes[quantizer] == {
            "lo": float(lo.clamp(max=0)), "hi": float(hi.clamp(min=0)), "tokens": 48 + 25
        }  # fmt: skip
        scale = stored.read(f"{quantizer}.scale").flatten()
        if kind == "input":
            assert torch.equal(scale, torch.maximum(hi / 127, lo / -128)[None])
        else:
            assert torch.equal(scale, ((hi - lo) / 255)[None])
            assert float(stored.read(f"{quantizer}.zero")) == float((-lo / scale).round())


def test_ranges_include_zero():
    """A range that lies on one side of 0 is widened: 0 must be a level."""
    layer = One(skewed(8, 16))
    specs = {
        "proj.weight_quantizer": QuantizerSpec(Grid.parse("int8.channel.sym.fp32")),
        "proj.input_quantizer": QuantizerSpec(Grid.parse("int8.tensor.code.fp32")),
    }
    insert(layer, specs, find_linears(layer))
    x = torch.rand(1, 6, 16) + 3
    calibrate_activations(
        layer, Replay(Capture(Chain([x]), [[Call((), {}, True)]], [None]), "float")
    )
    quantizer = layer.proj.input_quantizer
    assert torch.equal(quantizer.scale, (x.max() / 255).reshape(1, 1))
    assert int(quantizer.zero) == 0


class Mixed(nn.Module):
    """A norm in float32 in front of a linear in a narrower dtype, or the other way round."""

    def __init__(self, norm: torch.dtype, proj: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, dtype=norm)
        self.proj = nn.Linear(16, 16, dtype=proj)

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.norm(hidden_states.to(self.norm.weight.dtype))
        self.proj(hidden_states.to(self.proj.weight.dtype))
        return hidden_states


@pytest.mark.parametrize("narrow", ["norm", "proj"])
def test_a_range_must_be_finite_in_the_dtype_of_its_own_linear(narrow: str):
    """65500 is a float16 number, and the lowest of 256 levels that reach up to it is not."""
    wide = {"norm": torch.float32, "proj": torch.float32}
    layer = Mixed(**wide | {narrow: torch.float16})
    specs = {
        "proj.weight_quantizer": QuantizerSpec(Grid.parse("int8.channel.sym.fp32")),
        "proj.input_quantizer": QuantizerSpec(Grid.parse("int8.tensor.sym.fp32")),
    }
    insert(layer, specs, find_linears(layer))
    x = torch.zeros(1, 3, 16)
    x[0, 0, 0] = 65500
    replay = Replay(Capture(Chain([x]), [[Call((), {}, True)]], [None]), "float")
    if narrow == "proj":
        with pytest.raises(
            GridError, match=r"^proj\.input_quantizer: .*not finite in torch\.float16"
        ):
            calibrate_activations(layer, replay)
    else:
        calibrate_activations(layer, replay)
        assert float(layer.proj.input_quantizer.scale) == pytest.approx(65504 / 127, rel=1e-3)


def test_a_quantizer_that_no_token_reaches_is_an_error():
    layer = One(skewed(8, 16))
    specs = {
        f"{path}.{kind}_quantizer": QuantizerSpec(Grid.parse(grid))
        for path in ("proj", "spare")
        for kind, grid in {
            "weight": "int8.channel.sym.fp32",
            "input": "int8.tensor.sym.fp32",
        }.items()
    }
    insert(layer, specs, find_linears(layer))
    replay = Replay(
        Capture(Chain([torch.randn(1, 6, 16)]), [[Call((), {}, True)]], [None]), "float"
    )
    with pytest.raises(CalibrationError, match=r"^spare\.input_quantizer: no calibration token"):
        ongrid.Max().run(layer, replay)


def test_static_ranges_cannot_do_without_data():
    recipe = toy.recipe(
        "int8.channel.sym.fp32", ("*.layers.*.input_quantizer", "int8.tensor.sym.fp32")
    )
    with pytest.raises(CalibrationError, match="rtn sees no data, and 21 quantizers") as caught:
        ongrid.quantize(toy.build(), recipe)
    assert "max" in caught.value.remedy
    with pytest.raises(CalibrationError, match="Max needs calibration data"):
        ongrid.quantize(toy.build(), recipe, algorithm="max")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gptqq", "no algorithm is called 'gptqq'"),
        ("mse:shrnk=0.5", "Mse has no setting 'shrnk'"),
        ("mse:steps=many", "Mse.steps takes int, not 'many'"),
        ("gptq:scales=median", "Gptq.scales takes one of 'max', 'mse'"),
        ("gptq:act_order", "'act_order' is not a setting"),
        ("rtn:propagate=both", "Rtn.propagate takes one of"),
    ],
)
def test_settings_that_do_not_exist(text: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_algorithm(text)
    assert caught.value.remedy or "takes" in message


@pytest.mark.parametrize("text", ["mse:shrink=0.0", "mse:shrink=1.5", "mse:steps=1", "mse:steps=0"])
def test_settings_out_of_range(text: str):
    with pytest.raises(ConfigError, match=r"^mse: (shrink|steps) must be"):
        parse_algorithm(text)
