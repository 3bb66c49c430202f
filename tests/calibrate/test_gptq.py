"""GPTQ against a dense float64 column loop that shares no code with it, and its own laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ongrid
import toy
from ongrid.calibrate import gptq as module
from ongrid.calibrate.capture import Call, Capture
from ongrid.calibrate.chain import Chain
from ongrid.calibrate.gptq import Gptq, SecondMoment, factorise, sweep
from ongrid.calibrate.replay import Replay
from ongrid.errors import ConfigError, NonFiniteError
from ongrid.grid import Grid, Parts, QTensor
from ongrid.nn import QuantizerSpec, find_linears, freeze, insert

OUT, IN = 48, 64
GRIDS = [
    "int4.32.sym.fp16",
    "int4.32.code.fp16",
    "uint4.32.shift.fp16",
    "int3.16.code.bf16",
    "int8.channel.sym.fp32",
    "int4.tensor.code.fp16",
    "int4.16x16.sym.fp16",
    "nf4.32.sym.fp32",
    "e4m3.channel.sym.fp32",
    "e2m1.16.sym.[e4m3.tensor.sym.fp32]",
]


class Fan(nn.Module):
    """Linears that are all fed the hidden state."""

    def __init__(self, *outs: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.fan = nn.ModuleList(nn.Linear(IN, out, dtype=dtype) for out in outs or (OUT,))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + sum(linear(hidden_states).sum() for linear in self.fan)


def correlated(rows: int = 200, *, seed: int = 0) -> Tensor:
    """Inputs whose features depend on each other, as those of a model do."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(IN, IN, generator=generator) * torch.logspace(0, -1.5, IN)
    return torch.randn(rows, IN, generator=generator) @ mix


def run(
    layer: nn.Module, x: Tensor, grid: str, algorithm: Any = None
) -> tuple[list[QTensor], dict[str, Any]]:
    """The stored matrices and the notes of a run on inputs `[tokens in]`."""
    specs = {
        f"{path}.weight_quantizer": QuantizerSpec(Grid.parse(grid)) for path in find_linears(layer)
    }
    insert(layer, specs, find_linears(layer))
    replay = Replay(Capture(Chain([x[None]]), [[Call((), {}, True)]], [None]), "quantized")
    notes = (algorithm or Gptq()).run(layer, replay)
    return list(freeze(layer).values()), notes


def weight(layer: Fan) -> Tensor:
    return layer.fan[0].weight.detach().clone()


def plain(grid: str, w: Tensor) -> QTensor:
    return QTensor.rounded(Grid.parse(grid), w)


def losses(w: Tensor, q: QTensor, x: Tensor) -> Tensor:
    """e H e^T of every row, in float64."""
    return ((w.double() - q.dequantize(torch.float32).double()) @ x.double().T).square().sum(1)


# ---- the oracle ------------------------------------------------------------------------------


def oracle_fit(w: Tensor, bits: int, zero: bool) -> tuple[Tensor, Tensor]:
    """fp16 scale and zero of one group: the range, with 0 in it."""
    lo, hi = w.amin(1).clamp(max=0), w.amax(1).clamp(min=0)
    half = 2 ** (bits - 1)
    s = (hi - lo) / (2 * half - 1) if zero else torch.maximum(hi / (half - 1), lo / -half)
    s = s.float().half().double()
    z = (-lo / s).round().clamp(0, 2 * half - 1) if zero else torch.full_like(s, half)
    return s, z


def oracle(
    w: Tensor, x: Tensor, *, bits: int, group: int, zero: bool, damp: float, order: bool
) -> tuple[Tensor, Tensor]:
    """Codes and scales by the textbook: a full inverse, and every later column updated at once."""
    w, x = w.double().clone(), x.double()
    h = x.T @ x
    dead = h.diagonal() == 0
    h.diagonal().add_(torch.where(dead, 1.0, damp * h.diagonal()[~dead].mean()))
    columns = h.diagonal().argsort(descending=True) if order else torch.arange(IN)
    inverse = torch.linalg.inv(h[columns][:, columns])
    u = torch.linalg.cholesky(inverse, upper=True)
    codes = torch.zeros(w.shape, dtype=torch.uint8)
    fits = {}
    for g in range(IN // group):
        fits[g] = oracle_fit(w[:, g * group : (g + 1) * group], bits, zero)
    for step, j in enumerate(columns.tolist()):
        if not order and j % group == 0:
            fits[j // group] = oracle_fit(w[:, j : j + group], bits, zero)
        s, z = fits[j // group]
        q = ((w[:, j] / s).round() + z).clamp(0, 2**bits - 1)
        error = (w[:, j] - (q - z) * s) / u[step, step]
        for later, k in enumerate(columns.tolist()[step + 1 :], step + 1):
            w[:, k] -= error * u[step, later]
        codes[:, j] = q.to(torch.uint8)
    return codes, torch.stack([fits[g][0] for g in sorted(fits)], 1).half()


@pytest.mark.parametrize("order", [False, True], ids=["in turn", "act_order"])
@pytest.mark.parametrize("block", [128, 16, 7])
@pytest.mark.parametrize(("bits", "zero"), [(4, False), (4, True), (3, True), (2, False)])
def test_a_dense_float64_loop_gives_the_same(bits: int, zero: bool, block: int, order: bool):
    """Bound: a number within float32's error of the middle of two levels may go either way, and its
    row goes another way from there on: one row of 48. Here, on x86, all are equal."""
    layer, x = Fan(), correlated()
    x[:, 11] = 0
    w = weight(layer)
    codes, scales = oracle(w, x, bits=bits, group=32, zero=zero, damp=0.01, order=order)
    h = x.T @ x
    columns = h.diagonal().argsort(descending=True) if order else torch.arange(IN)
    factor = factorise(h, 0.01, columns)
    assert factor is not None
    grid = Grid.parse(f"int{bits}.32.{'code' if zero else 'sym'}.fp16")
    parts = sweep(grid, w, factor.u, torch.float32, block=block, order=columns if order else None)
    rows = (parts.codes != codes).any(1) | (parts.scale != scales).any(1)
    assert int(rows.sum()) <= 1


def test_the_oracle_is_not_plain_rounding():
    layer, x = Fan(), correlated()
    codes, _ = oracle(weight(layer), x, bits=4, group=32, zero=False, damp=0.01, order=False)
    assert float((codes != plain("int4.32.sym.fp16", weight(layer)).codes).float().mean()) > 0.2


# ---- T01: a rank-deficient Hessian -----------------------------------------------------------


def deficient() -> Tensor:
    x = torch.randn(16, IN, generator=torch.Generator().manual_seed(3))
    x[:, 5] = 0
    x[:, 9] = x[:, 8]
    return x


@pytest.mark.parametrize("zero", ["sym", "code"])
@pytest.mark.parametrize("order", [False, True])
def test_rank_deficient(zero: str, order: bool):
    layer, x, grid = Fan(), deficient(), f"int4.32.{zero}.fp16"
    w = weight(layer)
    [q], notes = run(layer, x, grid, Gptq(act_order=order))
    q.check()
    assert int(q.codes.max()) <= 15
    assert notes == {
        "fan.0": {"tokens": 16, "dead_columns": 1, "damp": 0.01, "rows_rounded_plainly": 0}
    }
    # Plain rounding with the same scales: of column 5, and as the bound of the error.
    same = QTensor(q.grid, Parts(q.grid.encode(w, q.parts.scale, q.parts.zero), *q.parts[1:]))
    assert torch.equal(q.codes[:, 5], same.codes[:, 5])
    assert float(losses(w, q, x).sum()) <= 1.01 * float(losses(w, same, x).sum())
    assert float(losses(w, q, x).sum()) < 0.5 * float(losses(w, plain(grid, w), x).sum())


@pytest.mark.parametrize("zero", ["sym", "code"])
def test_all_rows_zero(zero: str):
    layer, grid = Fan(), f"int4.32.{zero}.fp16"
    w = weight(layer)
    [q], notes = run(layer, torch.zeros(16, IN), grid)
    assert q.compare(plain(grid, w)).total == 0
    assert notes["fan.0"] == {
        "tokens": 16, "dead_columns": IN, "damp": 0.01, "rows_rounded_plainly": 0
    }  # fmt: skip


# ---- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_independent_inputs_give_plain_rounding(grid: str, order: bool):
    """A multiple of the identity as H: nothing to make up for, so equality is exact."""
    layer = Fan()
    w = weight(layer)
    [q], _ = run(layer, 2 * torch.eye(IN), grid, Gptq(act_order=order))
    assert q.compare(plain(grid, w)).total == 0


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("scales", ["max", "mse"])
@pytest.mark.parametrize("grid", GRIDS)
def test_never_worse_than_plain_rounding(grid: str, scales: Any, order: bool):
    """Row by row where rows have their own scales, else in sum. The choice is made in float32 with
    sums over 64 columns: bound 1e-5."""
    layer, x = Fan(), correlated()
    w = weight(layer)
    [q], notes = run(layer, x, grid, Gptq(act_order=order, scales=scales))
    q.check()
    before, after = losses(w, plain(grid, w), x), losses(w, q, x)
    size = {"16x16": 16, "tensor": OUT}.get(grid.split(".")[1], OUT if "[" in grid else 1)
    before, after = (loss.reshape(-1, size).sum(1) for loss in (before, after))
    assert bool((after <= before * (1 + 1e-5)).all())
    assert float(after.sum()) < 0.9 * float(before.sum())
    assert 0 <= notes["fan.0"]["rows_rounded_plainly"] < OUT


@pytest.mark.parametrize("grid", ["int4.32.code.fp16", "int4.channel.sym.fp16"])
def test_rows_that_come_out_worse_keep_plain_rounding(grid: str, monkeypatch: pytest.MonkeyPatch):
    """A sweep that spoils every third row: those rows, and only those, are plain."""
    layer, x = Fan(), correlated()
    w, ordinary = weight(layer), module.sweep
    kept: dict[str, Parts] = {}

    def spoiled(*args: Any, **kwargs: Any) -> Parts:
        parts = ordinary(*args, **kwargs)
        parts.codes[::3] = 0
        kept["swept"] = parts
        return parts

    monkeypatch.setattr(module, "sweep", spoiled)
    [q], notes = run(layer, x, grid)
    assert notes["fan.0"]["rows_rounded_plainly"] == OUT // 3
    expected, swept = plain(grid, w), QTensor(q.grid, kept["swept"])
    for name, tensor in q.tensors().items():
        assert torch.equal(tensor[::3], expected.tensors()[name][::3])
        assert torch.equal(tensor[1::3], swept.tensors()[name][1::3])


def test_mse_scales_are_those_of_the_mse_search():
    """With nothing to make up for, GPTQ with mse scales is the algorithm mse."""
    for grid in ("int3.32.code.fp16", "int2.16.sym.fp16", "int4.16x16.sym.fp16"):
        [q], _ = run(Fan(), torch.eye(IN), grid, Gptq(scales="mse"))
        [searched], _ = run(Fan(), torch.eye(IN), grid, ongrid.Mse())
        [rounded], _ = run(Fan(), torch.eye(IN), grid, ongrid.Rtn())
        assert q.compare(searched).codes == 0 < q.compare(rounded).total


@pytest.mark.parametrize("grid", ["int4.32.code.fp16", "int4.channel.sym.fp16", "nf4.32.sym.fp32"])
@pytest.mark.parametrize("order", [False, True])
def test_a_stacked_sweep_is_separate_sweeps(grid: str, order: bool):
    """Bound: a product of more rows may be summed in another order, and a tie then goes the other
    way, for the rest of its row: one row. Here, on x86, all are equal."""
    outs, x = (48, 32, 16), correlated()
    together, notes = run(Fan(*outs), x, grid, Gptq(act_order=order))
    assert list(notes) == ["fan.0", "fan.1", "fan.2"]
    for index, q in enumerate(together):
        alone = Fan(*outs)
        for other in {0, 1, 2} - {index}:
            alone.fan[other] = nn.Identity()
        [single], own = run(alone, x, grid, Gptq(act_order=order))
        assert own[f"fan.{index}"] == notes[f"fan.{index}"]
        assert q.shape == (outs[index], IN)
        assert int((q.codes != single.codes).any(1).sum()) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_are_those_of_the_compute_dtype(dtype: torch.dtype):
    """The sweep makes up for what the model will multiply with, rounded to its own dtype."""
    layer, x = Fan(dtype=dtype), correlated().to(dtype)
    w = weight(layer)
    [q], _ = run(layer, x, "int8.channel.sym.fp32")
    e = w.double() - q.dequantize(dtype).double()
    rounded = w.double() - plain("int8.channel.sym.fp32", w).dequantize(dtype).double()
    after, before = ((t @ x.double().T).square().sum() for t in (e, rounded))
    assert float(after) < 0.9 * float(before)


# ---- statistics ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_second_moment(dtype: torch.dtype):
    """Against float64 on the same inputs. Bound: a float32 rounding for each product and each sum,
    whatever the order, (tokens + 1) * 2**-24 of the sum of absolute products."""
    moment, batches = SecondMoment(), [correlated(n, seed=n).to(dtype) for n in (130, 1, 77)]
    for batch in batches:
        moment.update(batch)
    x = torch.cat(batches).double()
    assert moment.tokens == 208
    assert moment.sum is not None and moment.sum.dtype == torch.float32
    bound = 209 * 2**-24 * (x.abs().T @ x.abs())
    assert bool(((moment.sum.double() - x.T @ x).abs() <= bound).all())


def test_settings_of_torch_are_put_back(monkeypatch: pytest.MonkeyPatch):
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("high")
        run(Fan(dtype=torch.bfloat16), correlated().bfloat16(), "int4.32.sym.fp16")
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, "high")

        def fails(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(module, "encode_each", fails)
        with pytest.raises(KeyboardInterrupt):
            run(Fan(), correlated(), "int4.32.sym.fp16")
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, "high")
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def test_a_second_moment_that_overflows_is_refused():
    with pytest.raises(NonFiniteError, match=r"fan\.0: the second moment .* not finite") as caught:
        run(Fan(), correlated() * 1e20, "int4.32.sym.fp16")
    assert caught.value.remedy


# ---- damping ---------------------------------------------------------------------------------


def with_lowest(eigenvalue: float, n: int = IN) -> Tensor:
    """A symmetric matrix with mean diagonal 1 and one negative eigenvalue."""
    v = torch.ones(n, dtype=torch.float64) / n**0.5
    others = (n - eigenvalue) / (n - 1)
    h = others * (torch.eye(n, dtype=torch.float64) - torch.outer(v, v))
    return (h + eigenvalue * torch.outer(v, v)).float()


@pytest.mark.parametrize(
    ("eigenvalue", "damp"), [(-0.005, 0.01), (-0.05, 0.1), (-0.5, 1), (-5, 10)]
)
def test_damping_grows_until_the_factor_exists(eigenvalue: float, damp: float):
    h = with_lowest(eigenvalue)
    factor = factorise(h, 0.01)
    assert factor is not None and factor.damp == pytest.approx(damp)
    inverse = torch.linalg.inv(
        h.double() + factor.damp * h.double().diagonal().mean() * torch.eye(IN)
    )
    u = factor.u.double()
    assert torch.equal(u, u.triu())
    # Bound: float32 Cholesky and inverse of a matrix with a condition number below 1e3.
    assert float((u.T @ u - inverse).abs().max()) <= 1e-3 * float(inverse.abs().max())
    assert factorise(with_lowest(-50), 0.01) is None


def test_a_module_whose_hessian_is_hopeless_is_rounded_plainly_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    update = SecondMoment.update

    def indefinite(self: SecondMoment, x: Tensor) -> None:
        update(self, x)
        if x.shape[1] == 96:  # the down projections
            self.stripes = [with_lowest(-50, 96)]

    monkeypatch.setattr(SecondMoment, "update", indefinite)
    ongrid.quantize(toy.build(), toy.recipe(), toy.batches(), algorithm="gptq", out=tmp_path / "q")
    artifact = ongrid.Artifact.open(tmp_path / "q")
    notes = {p: n for record in artifact.records().values() for p, n in record["notes"].items()}
    hopeless = {path for path, note in notes.items() if "rounded_plainly" in note}
    assert hopeless == {f"model.layers.{i}.mlp.down_proj" for i in range(3)}
    assert "10" in notes["model.layers.0.mlp.down_proj"]["rounded_plainly"]
    w = toy.build().model.layers[0].mlp.down_proj.weight.detach()
    stored = artifact.matrix("model.layers.0.mlp.down_proj")
    assert stored.compare(plain("int4.32.code.fp16", w)).total == 0
    swept = artifact.matrix("model.layers.0.mlp.up_proj")
    w = toy.build().model.layers[0].mlp.up_proj.weight.detach()
    assert swept.compare(plain("int4.32.code.fp16", w)).total > 0


@pytest.mark.parametrize("settings", [{"damp": 0.0}, {"damp": -1.0}, {"damp": 20.0}, {"block": 0}])
def test_settings_that_make_no_sense(settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"gptq: (damp|block) must be"):
        Gptq(**settings)
