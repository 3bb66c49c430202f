"""Activation quantizers against arithmetic written out here: numpy, and torch's own float8."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laws.table import DTYPES, assert_same
from ongrid.errors import CalibrationError, GridError, NonFiniteError
from ongrid.grid import Grid
from ongrid.nn import ActivationQuantizer

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def quantizer(grid: str, *, dynamic: bool) -> ActivationQuantizer:
    return ActivationQuantizer(Grid.parse(grid), dynamic=dynamic)


def calibrated(grid: str, lo: float, hi: float) -> ActivationQuantizer:
    static = quantizer(grid, dynamic=False)
    static.set_range(torch.tensor([[lo]]), torch.tensor([[hi]]), torch.float32)
    return static


def hidden(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    x[0, 0] *= 100  # one token with an outlier
    return x.to(dtype)


def int8_by_numpy(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Symmetric int8, a range for each row that broadcasts; float32, cast once to x's dtype."""
    s = np.maximum(hi.float().numpy() / np.float32(127), lo.float().numpy() / np.float32(-128))
    q = np.clip(np.rint(x.float().numpy() / s), -128, 127) + 0.0  # a code has no minus zero
    return torch.from_numpy(q * s).to(x.dtype)


def uint8_by_numpy(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Asymmetric int8 with a zero code."""
    lo, hi = lo.float().clamp(max=0), hi.float().clamp(min=0)
    s = (hi - lo).numpy() / np.float32(255)
    z = np.clip(np.rint(-lo.numpy() / s), 0, 255).astype(np.float32)
    q = np.clip(np.rint(x.float().numpy() / s) + z, 0, 255)
    return torch.from_numpy((q - z) * s).to(x.dtype)


def e4m3_by_torch(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    s = torch.maximum(hi.float(), -lo.float()) / 448
    q = (x.float() / s).clamp(-448, 448).to(torch.float8_e4m3fn)
    return ((q.float() + 0.0) * s).to(x.dtype)


ORACLES = {
    "int8.{}.sym": int8_by_numpy,
    "int8.{}.code": uint8_by_numpy,
    "e4m3.{}.sym": e4m3_by_torch,
}
each_oracle = pytest.mark.parametrize("form", ORACLES)


@each_oracle
@each_dtype
def test_a_dynamic_quantizer_fits_every_token(form: str, dtype: torch.dtype):
    x = hidden(2, 5, 24, dtype=dtype)
    dynamic = quantizer(form.format("channel") + ".fp32", dynamic=True)
    rows = x.reshape(10, 24)
    lo, hi = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    assert_same(dynamic(x), ORACLES[form](rows, lo, hi).reshape(2, 5, 24))


@each_oracle
def test_a_dynamic_quantizer_fits_groups_of_features_or_the_whole_call(form: str):
    x = hidden(5, 24)
    groups = x.reshape(15, 8)
    lo, hi = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    by_group = quantizer(form.format("8") + ".fp32", dynamic=True)
    assert_same(by_group(x), ORACLES[form](groups, lo, hi).reshape(5, 24))
    whole = quantizer(form.format("tensor") + ".fp32", dynamic=True)
    assert_same(whole(x), ORACLES[form](x, x.amin().reshape(1, 1), x.amax().reshape(1, 1)))


def test_a_token_does_not_depend_on_its_neighbours():
    dynamic = quantizer("int8.channel.sym.fp32", dynamic=True)
    x = hidden(2, 5, 24)
    assert_same(dynamic(x)[1, 3], dynamic(x[1, 3]))
    assert_same(dynamic(x)[:, 2:], dynamic(x[:, 2:]))


@each_oracle
@each_dtype
def test_a_static_quantizer_keeps_its_range_and_saturates(form: str, dtype: torch.dtype):
    static = calibrated(form.format("tensor") + ".fp32", -3.0, 2.5)
    x = hidden(2, 5, 24, dtype=dtype)
    assert float(x.abs().max()) > 3
    lo, hi = torch.tensor([[-3.0]]), torch.tensor([[2.5]])
    expected = ORACLES[form](x.reshape(10, 24), lo, hi).reshape(2, 5, 24)
    assert_same(static(x), expected)
    assert_same(static(x[:1]), expected[:1])


def test_a_range_is_stored_in_the_grids_dtype_and_includes_zero():
    static = calibrated("int8.tensor.code.fp16", 0.5, 2.55)
    assert static.scale is not None and static.zero is not None
    assert static.scale.dtype == torch.float16 and static.zero.dtype == torch.uint8
    assert static.scale.tolist() == [[float(np.float16(2.55 / 255))]]
    assert static.zero.tolist() == [[0]]
    assert static(torch.zeros(1, 4)).tolist() == [[0, 0, 0, 0]]


def test_an_uncalibrated_static_quantizer_refuses_to_run():
    static = quantizer("int8.tensor.sym.fp32", dynamic=False)
    with pytest.raises(CalibrationError, match=r"int8\.tensor\.sym\.fp32 was never calibrated"):
        static(hidden(2, 8))


@pytest.mark.parametrize("grid", ["int8.channel.sym.fp32", "int8.8.sym.fp32", "int8.2x8.sym.fp32"])
def test_a_static_scale_per_token_is_refused(grid: str):
    with pytest.raises(GridError, match="has a scale per token"):
        quantizer(grid, dynamic=False)
    quantizer(grid, dynamic=True)


@pytest.mark.parametrize("grid", ["e4m3.tensor.sym.one", "int8.tensor.sym.[e4m3.tensor.sym.fp32]"])
def test_a_static_quantizer_needs_a_stored_scale(grid: str):
    with pytest.raises(GridError, match="needs a stored scale"):
        quantizer(grid, dynamic=False)


def test_a_range_that_is_not_finite_in_the_compute_dtype_is_refused():
    static = quantizer("int8.tensor.sym.fp32", dynamic=False)
    with pytest.raises(GridError, match=r"not finite in torch\.float16"):
        static.set_range(torch.tensor([[0.0]]), torch.tensor([[7e4]]), torch.float16)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_dynamic_quantizer_refuses_what_no_grid_holds(number: float):
    x = hidden(2, 8)
    x[1, 3] = number
    with pytest.raises(NonFiniteError, match="1 of 16 numbers"):
        quantizer("e4m3.channel.sym.fp32", dynamic=True)(x)


@each_dtype
@pytest.mark.parametrize("blocks", ["channel", "tensor", "4"])
def test_no_token_is_no_problem(blocks: str, dtype: torch.dtype):
    """An expert that no token visits."""
    for dynamic in (True, False) if blocks == "tensor" else (True,):
        empty = quantizer(f"int8.{blocks}.sym.fp32", dynamic=dynamic)(
            torch.zeros(0, 8, dtype=dtype)
        )
        assert (tuple(empty.shape), empty.dtype) == ((0, 8), dtype)


def test_bypassed_hands_on_the_tensor_itself():
    x = hidden(2, 8)
    for dynamic in (True, False):
        bypassed = quantizer("int8.tensor.sym.fp32", dynamic=dynamic)
        bypassed.bypassed = True
        assert bypassed(x) is x


def test_gradients_pass_and_stop_outside_a_static_range():
    d = torch.arange(1.0, 7.0).reshape(1, 6)
    x = torch.tensor([[-200.0, -128.0, 0.3, 126.9, 127.4, 140.0]], requires_grad=True)
    calibrated("int8.tensor.sym.fp32", -128.0, 127.0)(x).backward(d)
    assert x.grad is not None and x.grad.tolist() == [[0, 2, 3, 4, 5, 0]]
    y = x.detach().requires_grad_()
    quantizer("int8.channel.sym.fp32", dynamic=True)(y).backward(d)
    assert y.grad is not None and torch.equal(y.grad, d)


def test_casting_a_model_keeps_the_stored_range():
    static = calibrated("uint8.tensor.shift.fp32.fp16", -1.0, 0.37)
    before = {n: t.clone() for n, t in static.state_dict().items()}
    x = hidden(3, 8)
    expected = static(x)
    for cast in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.float()):
        cast(nn.Sequential(static))
        assert static.state_dict().keys() == before.keys() == {"scale", "zero"}
        for n, t in static.state_dict().items():
            assert_same(t, before[n])
        assert_same(static(x), expected)


@pytest.mark.parametrize(
    "grid", ["int8.tensor.sym.fp32", "int8.tensor.code.fp16", "e4m3.tensor.sym.bf16"]
)
def test_a_stored_range_loads_strictly(grid: str):
    static = calibrated(grid, -2.0, 3.0)
    loaded = quantizer(grid, dynamic=False)
    loaded.allocate()
    loaded.load_state_dict(static.state_dict(), strict=True)
    x = hidden(3, 8)
    assert_same(loaded(x), static(x))
    dynamic = quantizer(grid, dynamic=True)
    dynamic.allocate()
    assert not dynamic.state_dict()
