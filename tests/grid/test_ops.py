"""The registered ops are what compilers are told they are: shapes, strides, dtypes, no aliases."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ongrid.grid import Grid, ops, pack

FORMS = ["int4.8.sym.fp16", "int4.8.code.fp16", "uint4.8.shift.fp32", "e4m3.4x8.sym.fp32"]
FORMS += ["nf4.tensor.sym.bf16", "int8.channel.sym.one"]
each = pytest.mark.parametrize("name", FORMS)
each_layout = pytest.mark.parametrize("layout", ["rows", "columns"])


def check(op: object, *args: object) -> None:
    torch.library.opcheck(op, args)  # pyright: ignore[reportArgumentType]


def trained(name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """A matrix, scales and zeros as fp32 masters."""
    grid = Grid.parse(name)
    w = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    scale, zero = grid.fit(w)
    masters = w, grid.scales(scale).clone(), None if zero is None else zero.float()
    w, s, z = (None if t is None else t.requires_grad_() for t in masters)
    assert w is not None and s is not None
    return w, s, z


def laid_out(t: Tensor, layout: str) -> Tensor:
    return t if layout == "rows" else t.detach().T.contiguous().T.requires_grad_(t.requires_grad)


@each
@each_layout
def test_encode_and_decode(name: str, layout: str):
    w, s, z = trained(name)
    w = laid_out(w, layout)
    check(ops.encode, w, s, z, None, name)
    q = laid_out(ops.encode(w, s, z, None, name).detach().requires_grad_(), layout)
    for dtype in (torch.float32, torch.bfloat16):
        check(ops.decode, q, s, z, None, name, dtype)


@each
@each_layout
def test_their_gradients(name: str, layout: str):
    w, s, z = trained(name)
    w, s = laid_out(w.detach(), layout), s.detach()
    z = None if z is None else z.detach()
    d = laid_out(torch.randn(4, 16, generator=torch.Generator().manual_seed(1)), layout)
    check(ops.encode_backward, d, w, s, z, None, name)
    check(ops.encode_backward, d.contiguous(), w, s, z, None, name)
    q = ops.encode(w, s, z, None, name)
    for of_codes in (True, False):
        check(ops.decode_backward, d, q, s, z, None, name, of_codes)
        check(ops.decode_backward, d, laid_out(q, "columns"), s, z, None, name, of_codes)


@each
def test_gradients_do_not_depend_on_the_layout(name: str):
    w, s, z = trained(name)
    d = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    w, s, z = w.detach(), s.detach(), None if z is None else z.detach()
    q = ops.encode(w, s, z, None, name)
    turned = [laid_out(t, "columns") for t in (d, w, q)]
    assert not any(t.is_contiguous() for t in turned)
    for op, first, second, more in (
        (ops.encode_backward, (d, w), turned[:2], ()),
        (ops.decode_backward, (d, q), (turned[0], turned[2]), (True,)),
    ):
        rest = (s, z, None, name, *more)
        for a, b in zip(op(*first, *rest), op(*second, *rest), strict=True):
            assert torch.equal(a, b)


@each
@each_layout
def test_offsets_and_shares(name: str, layout: str):
    w, s, z = trained(name)
    o = laid_out(torch.full((4, 16), 0.25), layout).requires_grad_()
    check(ops.offset, laid_out(w, layout), o, s)
    check(ops.offset_backward, laid_out(w.detach(), layout), o.detach(), s.detach())
    up = torch.full(s.shape, 0.9, requires_grad=True)
    down = None if z is None else torch.full(s.shape, 0.8, requires_grad=True)
    s, z = s.detach(), None if z is None else z.detach()
    check(ops.shrink, s, z, up, down, name)
    ds, dz = torch.ones_like(s), torch.ones_like(s) if z is not None else s.new_empty(0)
    shares = up.detach(), None if down is None else down.detach()
    check(ops.shrink_backward, ds, dz, s, z, *shares, name)


def test_with_an_order():
    name = "int4.8.code.fp16"
    w, s, z = trained(name)
    order = torch.tensor([0, 1] * 8, dtype=torch.int32)
    check(ops.encode, w, s, z, order, name)
    check(ops.decode, ops.encode(w, s, z, order, name).detach(), s, z, order, name, torch.float16)


def test_stored_forms():
    s = torch.tensor([[0.1, -1.0, 1e9]], requires_grad=True)
    for name in ("int4.8.sym.fp16", "int4.8.sym.bf16", "int4.8.sym.fp32"):
        check(ops.store_scale, s, name)
    for name in ("int4.8.code.fp16", "uint4.8.shift.fp16", "uint4.8.shift.fp32"):
        check(ops.store_zero, s, name)
    codes = torch.tensor([[0.0, 130.0, 4.0]], requires_grad=True)
    check(ops.positive, codes, "e4m3.tensor.sym.fp32")
    assert ops.positive(codes, "e4m3.tensor.sym.fp32").tolist() == [[1, 1, 4]]


def test_a_trained_scale_and_shift_are_stored_finite():
    s = torch.tensor([[-1.0, 0.0, 1e-12, 3e38, 0.1]])
    for name, least, most in (("fp16", 2**-24, 65504.0), ("bf16", 2**-126, 3.389531389251535e38)):
        stored = ops.store_scale(s, f"int4.8.sym.{name}")
        assert float(stored.min()) == least or name == "bf16"
        assert stored[0, 0] == stored[0, 1] == least
        assert float(stored.max()) <= most
    z = torch.tensor([[1e9, -1e9, 0.1]])
    fp16 = ops.store_zero(z, "uint4.8.shift.fp16")
    assert fp16.tolist() == [[65504.0, -65504.0, float(torch.tensor(0.1).half())]]
    assert ops.store_zero(z, "int4.8.code.fp16").tolist() == [[15, 0, 0]]
    assert ops.store_zero(z, "uint4.8.shift.fp32").tolist() == z.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snap_and_unpack(dtype: torch.dtype):
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    check(ops.snap, x, "int8.channel.sym.fp32")
    check(ops.snap, laid_out(x, "columns"), "e4m3.tensor.sym.fp32")
    for bits in range(1, 9):
        codes = torch.full((3, 16), 2**bits - 1, dtype=torch.uint8)
        check(ops.unpack, pack(codes, bits), bits, 16)


# What a compiler may have kept on disk of the ops: a new line here with every new NAMESPACE.
TRACED = {"ongrid_2": "e74c78e3ee343e13"}


def test_what_compilers_keep_changes_only_with_the_names():
    """Schemas, shapes and gradients: all that a graph of another version may hold of this file.

    A graph compiled before `decode_backward` had its last argument was found on disk, and ran.
    """
    tree = ast.parse(Path(str(ops.__file__)).read_text(encoding="utf-8"))
    kept: list[str] = []
    for node in tree.body[1:]:
        if isinstance(node, ast.FunctionDef):
            said = ast.get_docstring(node) is not None
            node.body = node.body[1:] if said else node.body
            if "custom_op" in "".join(map(ast.unparse, node.decorator_list)):
                node.body = [ast.Pass()]  # the kernel is looked up when the graph runs
        if not isinstance(node, ast.Import | ast.ImportFrom):
            kept.append(ast.unparse(node))
    found = hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
    assert found == TRACED.get(ops.NAMESPACE), (
        f"what compilers keep of the ops has changed: count ops.NAMESPACE ({ops.NAMESPACE!r}) up, "
        f"and put its new name here with {found!r}"
    )
