"""QTensor: what is written, what is refused when read, and what a comparison counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from laws.table import GRIDS, assert_same, example, plain, shape
from ongrid.errors import GridError, StoreError
from ongrid.grid import Grid, Parts, QTensor, expected_tensors, pack

each = pytest.mark.parametrize("name", GRIDS)
NVFP4 = "e2m1.16.sym.[e4m3.tensor.sym.fp32]"
Q6 = "int6.4.sym.[int6.4.sym.fp16]"  # scale codes of 6 bits straddle bytes


def rounded(name: str) -> QTensor:
    grid = Grid.parse(name)
    return QTensor.rounded(grid, example(grid))


def ordered(q: QTensor) -> QTensor:
    """The same matrix with its columns reversed, which only an order can say."""
    groups = q.parts.scale.shape[1] if isinstance(q.parts.scale, Tensor) else 1
    order = (torch.arange(q.shape[1]) // (q.shape[1] // groups)).flip(0).to(torch.int32)
    return QTensor(q.grid, q.parts._replace(codes=q.codes.flip(1)), order)


def next_up(t: Tensor) -> Tensor:
    """The next larger number of the same dtype."""
    whole = {2: torch.int16, 4: torch.int32}[t.itemsize]
    return (t.view(whole) + 1).view(t.dtype)


@each
def test_tensors_come_back(name: str):
    q = rounded(name)
    stored = q.tensors()
    described = {n: (tuple(t.shape), t.dtype) for n, t in stored.items()}
    assert described == expected_tensors(q.grid, q.shape)
    again = QTensor.from_tensors(q.grid, q.shape, stored)
    assert again.compare(q).total == 0
    for n, t in again.tensors().items():
        assert_same(t, stored[n])
    again.check()
    assert_same(again.dequantize(torch.float32), q.dequantize(torch.float32))


@each
def test_stored_bits_are_the_bits_of_the_tensors(name: str):
    q = rounded(name)
    bits = sum(t.numel() * t.itemsize * 8 for t in q.tensors().values())
    assert q.grid.stored_bits(q.shape) == bits
    assert q.bits_per_weight == bits / (q.shape[0] * q.shape[1])
    with_order = ordered(q)
    bits = sum(t.numel() * t.itemsize * 8 for t in with_order.tensors().values())
    assert with_order.bits_per_weight == bits / q.codes.numel()


def test_bits_per_weight_of_known_formats():
    w = torch.zeros(128, 256)
    known = {
        "int4.64.code.fp16": 4 + 24 / 64,
        "int4.128.sym.fp16": 4 + 16 / 128,
        "int3.64.sym.bf16": 3 + 16 / 64,
        "int8.channel.sym.fp32": 8 + 32 / 256,
        "uint4.32.shift.fp16": 4 + 32 / 32,
        "e2m1.32.sym.[e8m0.channel.sym.one]": 4 + 8 / 32,
        NVFP4: 4 + 8 / 16 + 32 / w.numel(),
    }
    assert {n: QTensor.rounded(Grid.parse(n), w).bits_per_weight for n in known} == known


def test_names_shapes_and_dtypes_on_disk():
    assert expected_tensors(Grid.parse("int3.64.code.fp16"), (8, 128), ordered=True) == {
        "codes": ((8, 48), torch.uint8),
        "scale": ((8, 2), torch.float16),
        "zero": ((8, 2), torch.uint8),
        "order": ((128,), torch.int32),
    }
    assert expected_tensors(Grid.parse("uint5.8.shift.fp16.bf16"), (3, 40)) == {
        "codes": ((3, 25), torch.uint8),
        "scale": ((3, 5), torch.float16),
        "zero": ((3, 5), torch.bfloat16),
    }
    assert expected_tensors(Grid.parse(NVFP4), (4, 32)) == {
        "codes": ((4, 16), torch.uint8),
        "scale.codes": ((4, 2), torch.uint8),
        "scale.scale": ((1, 1), torch.float32),
    }
    assert expected_tensors(Grid.parse("e4m3.tensor.sym.one"), (2, 5)) == {
        "codes": ((2, 5), torch.uint8)
    }


def test_an_order_is_stored_and_read():
    q = rounded("int4.8.code.fp16")
    turned = ordered(q)
    stored = turned.tensors()
    assert stored["order"].dtype == torch.int32
    again = QTensor.from_tensors(q.grid, q.shape, stored)
    assert again.compare(turned).total == 0
    assert_same(again.dequantize(torch.float32), q.dequantize(torch.float32).flip(1))


# Refused on reading


@each
def test_every_missing_and_every_surplus_tensor_is_refused(name: str):
    q = rounded(name)
    stored = q.tensors()
    for missing in stored:
        rest = {n: t for n, t in stored.items() if n != missing}
        with pytest.raises(StoreError, match=f"no tensor '{missing}'"):
            QTensor.from_tensors(q.grid, q.shape, rest)
    for surplus in {"scale", "zero", "scale.codes", "weight"} - stored.keys():
        with pytest.raises(StoreError, match=f"a tensor '{surplus}', which"):
            QTensor.from_tensors(q.grid, q.shape, {**stored, surplus: stored["codes"]})


@each
def test_every_wrong_shape_and_dtype_is_refused(name: str):
    q = rounded(name)
    stored = ordered(q).tensors()
    for n, t in stored.items():
        for wrong in (t[:-1], t[..., None], t.to(torch.float64)):
            with pytest.raises(StoreError, match=f"{n} is ") as raised:
                QTensor.from_tensors(q.grid, q.shape, {**stored, n: wrong})
            assert str(tuple(t.shape)) in raised.value.what and str(t.dtype) in raised.value.what
    with pytest.raises(StoreError, match="codes is "):
        QTensor.from_tensors(q.grid, (q.shape[0] * 2, q.shape[1]), stored)


# check


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["int4.8.sym.fp16", "e4m3.channel.sym.fp32"])
def test_check_counts_bad_scales(name: str, bad: float):
    q = rounded(name)
    assert isinstance(q.parts.scale, Tensor)
    q.parts.scale[1, 0] = bad
    q.parts.scale[2, 0] = bad
    with pytest.raises(GridError, match=f"2 of {q.parts.scale.numel()} scales are not finite"):
        q.check()


def test_check_counts_codes_that_are_no_level():
    q = rounded("e4m3.channel.sym.fp32")
    q.codes[0, :3] = 0x7F  # NaN
    with pytest.raises(GridError, match=f"3 of {q.codes.numel()} codes decode to no finite number"):
        q.check()


def test_check_counts_codes_that_do_not_fit_their_bits():
    for name in ("int4.8.sym.fp16", "nf4.8.sym.fp16", NVFP4):
        q = rounded(name)
        q.codes[0, :2] = 16
        with pytest.raises(GridError, match=f"2 of {q.codes.numel()} codes do not fit 4 bits"):
            q.check()


def test_check_sees_into_scales_on_a_grid():
    for code in (0x7F, 0x00, 0x81):  # NaN, zero, negative
        q = rounded(NVFP4)
        assert isinstance(q.parts.scale, Parts)
        q.parts.scale.codes[3, 1] = code
        with pytest.raises(GridError, match=f"1 of {q.parts.scale.codes.numel()} scales"):
            q.check()


def test_check_counts_zeros_that_are_no_code():
    q = rounded("int4.8.code.fp16")
    assert q.parts.zero is not None
    q.parts.zero[0, 0], q.parts.zero[1, 1] = 16, 255
    with pytest.raises(GridError, match=f"2 of {q.parts.zero.numel()} zeros are no int4"):
        q.check()
    shifted = rounded("uint4.8.shift.fp16")
    assert shifted.parts.zero is not None
    shifted.parts.zero[0, 0] = torch.inf
    with pytest.raises(GridError, match="decode to no finite number"):
        shifted.check()


# compare


@each
def test_compare_counts_every_kind_once(name: str):
    q, other = rounded(name), rounded(name)
    assert q.compare(other) == (0, 0, 0)
    other.codes[0, 0] ^= 1
    assert q.compare(other) == (1, 0, 0)
    if plain(q.grid):
        scale = other.parts.scale
        assert isinstance(scale, Tensor)
        scale[-1, -1] = next_up(scale[-1, -1])
        assert q.compare(other) == (1, 1, 0)
    if other.parts.zero is not None:
        zero = other.parts.zero
        zero[0, -1] = next_up(zero[0, -1]) if zero.is_floating_point() else zero[0, -1] ^ 1
        assert q.compare(other).zeros == 1
        zero[-1, -1] = next_up(zero[-1, -1]) if zero.is_floating_point() else zero[-1, -1] ^ 1
        assert q.compare(other).zeros == (2 if zero.numel() > 1 else q.compare(other).zeros)
    assert q.compare(other) == other.compare(q)
    assert q.compare(other).total == sum(q.compare(other))


def test_compare_counts_scale_codes_not_their_bytes():
    q, other = rounded(Q6), rounded(Q6)
    assert isinstance(other.parts.scale, Parts) and isinstance(other.parts.scale.scale, Tensor)
    codes = other.parts.scale.codes
    codes[0, 1] ^= 0b111111  # its bits lie in two bytes
    assert pack(codes, 6).ne(q.tensors()["scale.codes"]).sum() == 2
    assert q.compare(other) == (0, 1, 0)
    codes[0, 0] ^= 1
    other.parts.scale.scale[0, 0] = next_up(other.parts.scale.scale[0, 0])
    assert q.compare(other) == (0, 3, 0)


def test_compare_counts_orders():
    q = rounded("int4.8.code.fp16")
    turned, again = ordered(q), ordered(q)
    assert turned.compare(again).total == 0
    assert again.order is not None and turned.order is not None
    again.order[0] = 1 - again.order[0]
    assert turned.compare(again) == (0, 1, 0)
    same_codes = QTensor(q.grid, turned.parts)
    assert turned.compare(same_codes) == same_codes.compare(turned) == (0, q.shape[1], 0)


def test_compare_refuses_other_grids_and_shapes():
    q = rounded("int4.8.code.fp16")
    with pytest.raises(
        GridError, match=r"int4\.8\.code\.fp16 .* cannot be compared with int4\.8\.sym"
    ):
        q.compare(rounded("int4.8.sym.fp16"))
    half = QTensor.rounded(q.grid, torch.zeros(shape(q.grid)[0], 8))
    with pytest.raises(GridError, match="cannot be compared"):
        q.compare(half)


def test_it_is_frozen():
    q = rounded("int4.8.sym.fp16")
    with pytest.raises(AttributeError):
        q.order = None  # pyright: ignore[reportAttributeAccessIssue]
    assert replace(q, order=torch.zeros(16, dtype=torch.int32)).order is not None
