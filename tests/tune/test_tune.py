"""Tuning on the grid: what trains, what the merge shows, and that it can fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ongrid
import toy
from laws.table import assert_same
from ongrid.errors import ConfigError, MergeMismatch, Problems, StructureError
from ongrid.grid import Grid, Parts, QTensor
from ongrid.nn import CodedWeight, QuantLinear, quant_linears
from ongrid.tune.merge import merge
from ongrid.tune.method import METHODS, AbstractMethod, Peqa, attach, parameter_groups
from ongrid.tune.qalora import QaLora, ShiftedWeight

FORMATS = ("int4.32.code.fp16", "uint3.32.shift.bf16", "int2.32.code.fp32", "uint4.32.shift.fp16")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAST: dict[str, AbstractMethod] = {
    "peqa": Peqa(lr=1e-3),
    "peqa_zeros": Peqa(zeros=True, lr=1e-2),
    "qalora": QaLora(rank=4, alpha=8.0, lr=2e-2),
    "qalora_all": QaLora(rank=3, alpha=8.0, dropout=0.2, scales=True, lr=1e-2),
}
each_method = pytest.mark.parametrize("name", FAST)
each_grid = pytest.mark.parametrize("grid", FORMATS)


def quantized(grid: str = FORMATS[0], dtype: torch.dtype = torch.float32) -> Any:
    return ongrid.quantize(toy.build(dtype=dtype), toy.recipe(grid))


def train(model: Any, method: AbstractMethod, steps: int = 20) -> list[float]:
    optimizer = torch.optim.AdamW(parameter_groups(model, method))
    model.train()
    ids, losses = toy.ids(2, 12), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def matrices(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        return {path: linear.weight.clone() for path, linear in quant_linears(model).items()}


def test_every_method_of_the_table_is_tried_here():
    assert {type(method) for method in FAST.values()} == {METHODS[name] for name in METHODS}


@each_method
@each_grid
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attached_untrained_is_what_was_loaded(name: str, grid: str, dtype: torch.dtype):
    model = quantized(grid, dtype)
    before = matrices(model)
    attach(model, FAST[name])
    for path, w in matrices(model.eval()).items():
        assert_same(w, before[path])


@each_method
@each_grid
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_trained_is_what_is_merged(name: str, grid: str, dtype: torch.dtype):
    model = quantized(grid, dtype)
    fixed = {n: t.clone() for n, t in model.state_dict().items() if n.endswith(".codes")}
    before = matrices(model)
    attach(model, FAST[name])
    losses = train(model, FAST[name], 60)
    assert losses[-1] < losses[0]
    model.eval()
    trained, logits = matrices(model), model(toy.ids(1, 9)).logits
    assert any(not torch.equal(w, before[path]) for path, w in trained.items())
    proof = merge(model)
    assert (proof.matrices, proof.differing) == (len(trained), 0)
    for path, w in matrices(model).items():
        assert_same(w, trained[path])
        assert type(quant_linears(model)[path].weight_quantizer) is CodedWeight
    assert_same(model(toy.ids(1, 9)).logits, logits)
    for key, codes in fixed.items():
        assert_same(model.state_dict()[key], codes)
    assert merge(model) == proof  # a second time it proves the same and changes nothing


@each_method
def test_a_merge_is_proved_under_autocast(name: str):
    model = quantized()
    attach(model, FAST[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(model, FAST[name])
        model.eval()
        trained = matrices(model)
        merge(model)
    for path, w in matrices(model).items():
        assert_same(w, trained[path])


@pytest.mark.parametrize("name", ["peqa", "peqa_zeros", "qalora"])  # dropout would draw anew
def test_unmerged_state_goes_on_training_as_if_nothing_had_happened(name: str, tmp_path: Path):
    method = FAST[name]
    model = quantized()
    attach(model, method)
    train(model, method, 3)
    torch.save(model.state_dict(), tmp_path / "state")
    again = quantized()
    attach(again, method, seed=1)
    again.load_state_dict(torch.load(tmp_path / "state"), strict=True)
    assert train(model, method, 3) == train(again, method, 3)
    assert merge(model) == merge(again)


def wide(rows: int = 48, cols: int = 128, grid: str = FORMATS[0]) -> QTensor:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(rows, cols, generator=generator) * 0.02
    return QTensor.rounded(Grid.parse(grid), w, torch.bfloat16)


@pytest.mark.parametrize("grid", FORMATS)
def test_no_healthy_adapter_is_refused(grid: str):
    """Standard deviations log-uniform in [0.02, 2], in bf16."""
    generator = torch.Generator().manual_seed(0)
    q = wide(grid=grid)
    weight = ShiftedWeight(q, torch.bfloat16, rank=4, factor=2.0)
    for _ in range(250):
        std = 0.02 * 100 ** float(torch.rand((), generator=generator))
        with torch.no_grad():
            weight.a.normal_(0, 1, generator=generator)
            weight.b.normal_(0, std, generator=generator)
        model = nn.Sequential(QuantLinear(weight))
        assert merge(model).differing == 0


class Corrupted(ShiftedWeight):
    """Stores something else than it computes."""

    def __init__(self, q: QTensor, spoil: Callable[[Parts, Tensor], Parts], seed: int) -> None:
        super().__init__(q, torch.bfloat16, rank=4, factor=2.0)
        self.spoil, self.computes = spoil, True
        self.generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.a.normal_(0, 1, generator=self.generator)
            self.b.normal_(0, 0.5, generator=self.generator)

    def parts(self) -> Parts:
        parts = super().parts()
        if self.computes:  # the linear asks first, then the merge
            self.computes = False
            return parts
        return self.spoil(parts, self.pick(parts))

    def pick(self, parts: Parts) -> Tensor:
        return torch.randint(0, 2**30, (2,), generator=self.generator)


def flipped(parts: Parts, at: Tensor) -> Parts:
    codes = parts.codes.clone()
    codes.view(-1)[at[0] % codes.numel()] ^= 1
    return parts._replace(codes=codes)


def one_ulp(parts: Parts, at: Tensor) -> Parts:
    assert isinstance(parts.scale, Tensor)
    scale = parts.scale.clone()
    flat = scale.view(-1).view(torch.int16)
    flat[at[0] % flat.numel()] += 1
    return parts._replace(scale=scale)


def swapped(parts: Parts, at: Tensor) -> Parts:
    """Two neighbouring groups of one row change their scales and zeros."""
    assert isinstance(parts.scale, Tensor) and parts.zero is not None
    scale, zero = parts.scale.clone(), parts.zero.clone()
    row = int(at[0] % len(scale))
    for t in (scale, zero):
        t[row, :2] = t[row, :2].flip(0)
    return parts._replace(scale=scale, zero=zero)


def off_by_one(parts: Parts, at: Tensor) -> Parts:
    assert parts.zero is not None
    zero = parts.zero.clone()
    flat = zero.view(-1)
    index = at[0] % flat.numel()
    flat[index] = flat[index] - 1 if float(flat[index]) > 0 else flat[index] + 1
    return parts._replace(zero=zero)


CORRUPTIONS = {
    f.__name__: f
    for f in (flipped, one_ulp, swapped, off_by_one)
}  # fmt: skip


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_every_corruption_is_caught(kind: str):
    q = wide()
    for seed in range(200):
        weight = Corrupted(q, CORRUPTIONS[kind], seed)
        model = nn.Sequential(QuantLinear(weight))
        with pytest.raises(MergeMismatch, match="are not those"):
            merge(model)
        assert model[0].weight_quantizer is weight  # nothing is lost


def test_a_dropped_adapter_is_caught():
    q = wide()
    for seed in range(200):
        weight = Corrupted(q, lambda parts, at: parts, seed)
        lost = CodedWeight(q, torch.bfloat16).parts()
        weight.spoil = lambda parts, at, lost=lost: lost
        with pytest.raises(MergeMismatch):
            merge(nn.Sequential(QuantLinear(weight)))


def test_fractional_and_far_steps_move_codes_of_zeros_only():
    """+0.37 steps move no code of a zero, -9.4 steps move it by 9; codes stay (T11)."""
    q = wide(grid="int4.32.code.fp16")
    weight = ShiftedWeight(q, torch.float32, rank=1, factor=1.0)
    with torch.no_grad():
        weight.a.fill_(1.0)
        weight.b[:24] = 0.37
        weight.b[24:] = -9.4
    after = weight.freeze()
    assert q.parts.zero is not None and after.parts.zero is not None
    assert torch.equal(after.codes, q.codes)
    assert torch.equal(after.parts.zero[:24], q.parts.zero[:24])
    expected = (q.parts.zero[24:].float() + 9.4).round().clamp(0, 15)
    assert torch.equal(after.parts.zero[24:].float(), expected)
    assert weight.saturated() == int((q.parts.zero[24:].float() + 9.4 > 15.5).sum())
    assert weight.moved() == pytest.approx(
        float((after.parts.zero.float() != q.parts.zero.float()).float().mean())
    )


def test_the_adapter_is_the_papers_in_real_arithmetic():
    """On a grid with shifts, y gains (alpha / rank) B A times the sums of each group's inputs."""
    q = wide(grid="uint4.32.shift.fp32")
    weight = ShiftedWeight(q, torch.float32, rank=4, factor=2.0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight.a.normal_(0, 1, generator=generator)
        weight.b.normal_(0, 0.3, generator=generator)
    x = torch.randn(5, q.shape[1], generator=generator)
    s = q.grid.scales(q.parts.scale).double()
    pooled = x.double().reshape(5, -1, 32).sum(2)
    delta = 2.0 * weight.b.double() @ weight.a.double() * s
    expected = x.double() @ q.dequantize(torch.float32).double().T + pooled @ delta.T
    found = QuantLinear(weight)(x).double()
    # Bound: float32 weights and a float32 product over 128 inputs.
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_dropout_is_of_training_alone():
    weight = ShiftedWeight(wide(), torch.float32, rank=4, factor=2.0, dropout=0.5)
    with torch.no_grad():
        weight.a.fill_(1.0)
        weight.b.fill_(1.0)
    weight.train()
    assert not torch.equal(weight(), weight())
    frozen = weight.freeze()
    assert weight.training
    assert_same(frozen.dequantize(torch.float32), weight.eval()())


def test_what_cannot_be_tuned_is_refused_all_at_once_and_nothing_changes():
    model = ongrid.quantize(toy.build(), toy.recipe("int4.32.sym.fp16"))
    before = {path: linear.weight_quantizer for path, linear in quant_linears(model).items()}
    with pytest.raises(Problems, match="no zeros that an adapter could move") as caught:
        attach(model, QaLora())
    assert len(caught.value.problems) == len(before)
    assert all(quant_linears(model)[p].weight_quantizer is w for p, w in before.items())
    with pytest.raises(StructureError, match="nothing in this model is quantized"):
        attach(toy.build(), Peqa())
    with pytest.raises(StructureError, match="nothing in this model is quantized"):
        merge(toy.build())
    attach(model, Peqa())
    with pytest.raises(Problems, match="being trained already"):
        attach(model, Peqa())


def test_groups_name_what_trains_outside_and_decay_nothing():
    model = quantized()
    with pytest.raises(ConfigError, match="no quantized matrix trains"):
        parameter_groups(model.requires_grad_(False), Peqa())
    attach(model, Peqa(lr=0.5))
    (group,) = parameter_groups(model, Peqa(lr=0.5))
    assert (group["name"], group["lr"], group["weight_decay"]) == ("grid", 0.5, 0.0)
    model.model.norm.weight.requires_grad_()
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        parameter_groups(model, Peqa())
    groups = parameter_groups(model, Peqa(), extra_lr=0.1)
    assert [g["name"] for g in groups] == ["grid", "extra"]
    assert groups[1]["params"] == [model.model.norm.weight] and groups[1]["lr"] == 0.1


@pytest.mark.parametrize(
    "settings", [{"rank": 0}, {"alpha": 0.0}, {"lr": 0.0}, {"dropout": 1.0}, {"dropout": -0.1}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        QaLora(**settings)
    with pytest.raises(ConfigError, match="lr"):
        Peqa(lr=0.0)


def test_attaching_and_merging_touch_no_global_generator():
    model = quantized()
    state = torch.get_rng_state()
    attach(model, QaLora())
    other = copy.deepcopy(model)
    merge(model)
    assert torch.equal(torch.get_rng_state(), state)
    again = quantized()
    attach(again, QaLora())
    for (n, p), (_, o) in zip(again.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, o), n
