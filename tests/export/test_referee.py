"""Two decoders, written apart, agree in every bit."""

import ast
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ongrid.export.referee
from ongrid.errors import OngridError, StoreError, VerifyError
from ongrid.export.referee import Decoded, Stored, decode
from ongrid.grid import LEVELS, Grid, Parts, QTensor
from ongrid.store.shards import tensor_hash

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TAGS = {
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
SYMMETRIC = [
    f"{levels}.{blocks}.sym.{scale}"
    for levels in LEVELS
    if levels != "e8m0"
    for blocks, scale in (("32", "fp16"), ("channel", "bf16"), ("tensor", "fp32"))
]
GRIDS = [
    *SYMMETRIC,
    *(f"int{bits}.32.code.fp16" for bits in range(2, 9)),
    "int4.channel.code.bf16",
    "int4.tensor.code.fp32",
    "int3.2x16.code.fp32",
    *(f"uint{bits}.32.shift.fp16" for bits in range(2, 9)),
    "uint4.32.shift.bf16.fp32",
    "uint4.32.shift.fp32.bf16",
    "uint4.4x8.shift.bf16",
    "e4m3.4x48.sym.fp32",
    "e2m1.16.sym.[e4m3.tensor.sym.fp32]",
    "e2m1.32.sym.[e8m0.1.sym.one]",
    "int4.32.code.[uint8.3.sym.fp32]",
    "uint4.16.shift.[uint6.6.sym.fp16].fp16",
    "nf4.16.sym.[e4m3.channel.sym.[int8.tensor.sym.fp32]]",
    "e4m3.tensor.sym.one",
    "int8.tensor.sym.one",
]


def stored(q: QTensor) -> dict[str, Stored]:
    return {name: as_stored(tensor) for name, tensor in q.tensors().items()}


def as_stored(t: Tensor) -> Stored:
    flat = t.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Stored(TAGS[t.dtype], tuple(t.shape), flat)


def refereed(q: QTensor, dtype: torch.dtype) -> Decoded:
    return decode(str(q.grid), q.shape, str(dtype).removeprefix("torch."), stored(q))


def assert_same(q: QTensor, dtype: torch.dtype) -> Tensor:
    ours, theirs = q.dequantize(dtype), refereed(q, dtype)
    bits = ours.contiguous().view(torch.uint8).numpy().view(theirs.bits.dtype)
    wrong = np.argwhere(bits != theirs.bits)
    assert not len(wrong), f"{len(wrong)} numbers differ, the first at {wrong[0]}"
    assert theirs.shape == q.shape
    assert theirs.hash == tensor_hash(ours)
    return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", GRIDS)
def test_the_referee_decodes_every_grid_as_the_library_does(text: str, dtype: torch.dtype) -> None:
    grid, generator = Grid.parse(text), torch.Generator().manual_seed(len(text))
    w = torch.randn((12, 96), generator=generator) * torch.logspace(-4, 1, 12)[:, None]
    if grid.zero is None and grid.levels.lo >= 0:
        w = w.abs()
    assert_same(QTensor.rounded(grid, w.to(dtype)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", ["int4.32.code.fp16", "uint3.16.shift.bf16", "nf4.32.sym.fp32"])
def test_columns_may_belong_to_groups_in_any_order(text: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q = QTensor.rounded(Grid.parse(text), torch.randn((8, 96), generator=generator).to(dtype))
    order = (torch.arange(96) // int(q.grid.blocks.cols))[torch.randperm(96, generator=generator)]
    shuffled = QTensor(q.grid, q.parts, order.to(torch.int32))
    assert not torch.equal(assert_same(shuffled, dtype), q.dequantize(dtype))


@pytest.mark.parametrize("bits", range(2, 9))
def test_rows_that_end_within_a_byte(bits: int) -> None:
    for cols in (1, 3, 7, 8, 9, 31):
        w = torch.randn((5, cols), generator=torch.Generator().manual_seed(cols))
        assert_same(QTensor.rounded(Grid.parse(f"int{bits}.channel.code.fp16"), w), torch.float32)


def test_a_matrix_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ongrid.export.referee, "_CHUNK", 100)
    w = torch.randn((21, 96), generator=torch.Generator().manual_seed(2))
    for text in ("int4.32.code.fp16", "int4.3x32.code.fp16", "e2m1.16.sym.[e4m3.7x2.sym.fp32]"):
        assert_same(QTensor.rounded(Grid.parse(text), w), torch.bfloat16)


@pytest.mark.parametrize("name", LEVELS)
def test_every_code_has_the_library_s_value(name: str) -> None:
    levels = LEVELS[name]
    grid = Grid.parse(f"{name}.tensor.sym.one")
    codes = torch.arange(2**levels.bits, dtype=torch.uint8)[None]
    known = ~levels.value(codes).isnan()
    assert_same(QTensor(grid, Parts(codes[known][None], None, None)), torch.float32)
    for code in codes[~known]:
        with pytest.raises(VerifyError, match="NaN"):
            refereed(QTensor(grid, Parts(code.reshape(1, 1), None, None)), torch.float32)


def float32(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def rounding_cases() -> Tensor:
    """Positive float32 numbers at, just below and just above every edge of bfloat16, and more."""
    high = torch.arange(0x7F80)[:, None] << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    edges = (high | low).flatten()
    wild = torch.randint(1, 0x7F800000, (100_000,), generator=torch.Generator().manual_seed(3))
    halves = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    middles = (halves[1:] + halves[:-1]) / 2
    around = torch.cat([halves, middles, middles.nextafter(halves[1:]), torch.tensor([65520.0])])
    return torch.cat([float32(edges[1:]), float32(wild), around])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", [3, 1], ids=["positive", "negative"])
def test_the_one_rounding_at_every_edge(dtype: torch.dtype, code: int) -> None:
    """A number that is 1 or -1 times an fp32 scale is any float32 whatever."""
    s = rounding_cases()[:, None]
    grid = Grid.parse("int2.channel.sym.fp32")
    w = assert_same(
        QTensor(grid, Parts(torch.full(s.shape, code, dtype=torch.uint8), s, None)), dtype
    )
    assert torch.equal(w.abs(), s.to(dtype))
    if dtype != torch.float32:
        tiny = torch.finfo(dtype).tiny
        assert w.isinf().any()
        assert ((w.abs() > 0) & (w.abs() < tiny)).sum() > 100
        below, above = s.nextafter(s * 0).to(dtype), s.nextafter(s * 2).to(dtype)
        edges = (below != above) & s.isfinite()  # ties, and what lies beside them
        assert edges.sum() > 10_000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "text",
    [
        *("int8.channel.code.fp16", "int8.channel.code.bf16"),
        *("uint8.channel.shift.fp16", "e5m2.channel.sym.fp16"),
    ],
)
def test_scales_from_the_smallest_to_the_largest(text: str, dtype: torch.dtype) -> None:
    grid = Grid.parse(text)
    assert isinstance(grid.scale, torch.dtype)
    bits = torch.arange(1, 0x7C00 if grid.scale == torch.float16 else 0x7F80, 37, dtype=torch.int16)
    s = bits.view(grid.scale)[:, None]
    generator = torch.Generator().manual_seed(4)
    q = torch.randint(0, 120, (len(s), 24), dtype=torch.uint8, generator=generator)
    z = None
    if grid.zero == "code":
        z = torch.randint(0, 256, s.shape, dtype=torch.uint8, generator=generator)
    elif grid.zero == "shift":
        z = -s.flip(0)
    w = assert_same(QTensor(grid, Parts(q, s, z)), dtype)
    assert w.isinf().any() == (dtype == torch.float16 or grid.scale == torch.bfloat16)


def test_the_order_of_product_and_sum_is_seen() -> None:
    """One rounding instead of two (a fused sum) gives other bits, so the comparison is not idle."""
    grid = Grid.parse("uint8.channel.shift.fp32")
    generator = torch.Generator().manual_seed(5)
    q = torch.randint(0, 256, (64, 64), dtype=torch.uint8, generator=generator)
    s, b = torch.rand((64, 1), generator=generator), torch.rand((64, 1), generator=generator)
    w = assert_same(QTensor(grid, Parts(q, s, b)), torch.float32)
    fused = (q.double() * s.double() + b.double()).float()
    assert (w != fused).sum() > 100


def test_the_referee_imports_nothing_of_what_it_judges() -> None:
    tree = ast.parse(Path(ongrid.export.referee.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
    foreign = {name for name in imported if str(name).split(".")[0] not in sys.stdlib_module_names}
    assert foreign == {"numpy", "ongrid.errors"}


# ---- what it refuses ----------------------------------------------------------------------------


def a_matrix(text: str = "int4.32.code.fp16") -> tuple[str, dict[str, Stored]]:
    w = torch.randn((4, 64), generator=torch.Generator().manual_seed(6))
    return text, stored(QTensor.rounded(Grid.parse(text), w))


def refusal(text: str, tensors: dict[str, Stored], shape: tuple[int, int] = (4, 64)) -> str:
    with pytest.raises(OngridError) as caught:
        decode(text, shape, "float32", tensors)
    return str(caught.value)


def test_tensors_that_are_not_those_of_the_grid_are_refused() -> None:
    text, tensors = a_matrix()
    assert "no tensor 'zero'" in refusal(text, {**a_matrix("int4.32.sym.fp16")[1]})
    assert "has no tensor zero" in refusal("int4.32.sym.fp16", tensors)
    assert "scale is fp16 [4, 2], not bf16 [4, 2]" in refusal("int4.32.code.bf16", tensors)
    assert "scale is fp16 [4, 2], not fp16 [4, 4]" in refusal("int4.16.code.fp16", tensors)
    assert "codes is code [4, 32], not code [4, 40]" in refusal("int5.32.code.fp16", tensors)
    assert "blocks of 1 x 48" in refusal("int4.48.code.fp16", tensors)
    assert "codes is" in refusal(text, tensors, (8, 32))
    nested, parts = a_matrix("e2m1.16.sym.[e4m3.tensor.sym.fp32]")
    surplus = {**parts, "scale.order": as_stored(torch.zeros(4, dtype=torch.int32))}
    assert "scales have no tensor order" in refusal(nested, surplus)


def test_zeros_and_orders_that_lead_nowhere_are_refused() -> None:
    text, tensors = a_matrix()
    beyond = as_stored(torch.full((4, 2), 16, dtype=torch.uint8))
    assert "zero 16 is no code of 4 bits" in refusal(text, {**tensors, "zero": beyond})
    for group in (-1, 2):
        order = as_stored(torch.full((64,), group, dtype=torch.int32))
        assert "groups outside 0 to 1" in refusal(text, {**tensors, "order": order})


def test_a_scale_that_is_no_number_is_refused() -> None:
    text, tensors = a_matrix()
    scale = as_stored(torch.full((4, 2), float("nan"), dtype=torch.float16))
    assert "NaN" in refusal(text, {**tensors, "scale": scale})


@pytest.mark.parametrize(
    "text",
    [
        *("", "int4", "int4.32", "int4.32.code", "int9.32.sym.fp16", "int4.0.sym.fp16"),
        *("int4.32.none.fp16", "int4.32.sym.fp8", "int4.32.sym.fp16.fp16", "int4.32.code.one"),
        *("uint4.32.shift.[e4m3.tensor.sym.fp32]", "int4.32.sym.[e4m3.tensor.sym]"),
        "e4m4.32.sym.fp16",
    ],
)
def test_strings_that_name_no_grid_are_refused(text: str) -> None:
    with pytest.raises(VerifyError, match="does not know the"):
        decode(text, (4, 64), "float32", {})
    with pytest.raises(OngridError):
        Grid.parse(text)


def test_errors_are_store_errors_or_failed_proofs() -> None:
    text, tensors = a_matrix()
    del tensors["scale"]
    with pytest.raises(StoreError, match="no tensor 'scale'"):
        decode(text, (4, 64), "float32", tensors)
