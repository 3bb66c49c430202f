"""Grids: their strings, blocks and refusals, and small examples worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ongrid.errors import GridError
from ongrid.grid import LEVELS, Blocks, Grid, Int, Parts
from ongrid.grid.grid import DTYPES, near_divisors, smallest_scale

# Strings


def combinations() -> list[str]:
    """The whole grammar, one level deep."""
    blocks, dtypes = ("1", "64", "128x128", "2x16", "channel", "tensor"), tuple(DTYPES)
    nested = ("[e4m3.tensor.sym.fp32]", "[uint6.8.sym.fp16]", "[e8m0.channel.sym.one]")
    names = []
    for name, block in itertools.product(LEVELS, blocks):
        names += [f"{name}.{block}.sym.{stored}" for stored in ("one", *dtypes, *nested)]
        levels = LEVELS[name]
        if not isinstance(levels, Int):
            continue
        if levels.signed:
            names += [f"{name}.{block}.code.{stored}" for stored in (*dtypes, *nested)]
        else:
            names += [f"{name}.{block}.shift.{stored}" for stored in dtypes]
            names += [f"{name}.{block}.shift.{s}.{z}" for s in nested for z in dtypes]
            names += [f"{name}.{block}.shift.{s}.{z}" for s in dtypes for z in dtypes if s != z]
    return names


def test_parse_inverts_str():
    names = combinations()
    assert len(names) == len(set(names)) > 1500
    assert [str(Grid.parse(name)) for name in names] == names
    assert len({Grid.parse(name) for name in names}) == len(names)


def test_parse_reads_every_field():
    grid = Grid.parse("uint4.2x16.shift.[uint6.8.sym.fp16].bf16")
    assert grid.levels == Int(4, signed=False)
    assert grid.blocks == Blocks(2, 16)
    assert grid.scale == Grid(Int(6, signed=False), Blocks(1, 8), torch.float16)
    assert (grid.zero, grid.zero_dtype) == ("shift", torch.bfloat16)
    assert Grid.parse("uint4.64.shift.fp16").zero_dtype == torch.float16
    assert Grid.parse("int4.64.code.fp16").zero_dtype is None
    assert Grid.parse("int8.tensor.sym.one").scale is None


def test_two_ways_to_write_a_grid_name_the_same_one():
    assert Grid.parse("int4.1x64.sym.fp16") == Grid.parse("int4.64.sym.fp16")
    assert Grid.parse("uint4.64.shift.fp16.fp16") == Grid.parse("uint4.64.shift.fp16")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a grid"),
        ("int4", "is not a grid"),
        ("int4.64.sym", "is not a grid"),
        ("int4.64.sym.fp16.", "is not a grid"),
        (" int4.64.sym.fp16", "is not a grid"),
        ("int4.64.sym.fp16\n", "is not a grid"),
        ("int4.64.asym.fp16", "is not a grid"),
        ("int4.64.sym.[]", "is not a grid"),
        ("int4.64.sym.[int8.8.sym.fp16", "is not a grid"),
        ("int4.64.sym.fp16.fp16.fp16", "is not a grid"),
        ("int1.64.sym.fp16", "no levels 'int1'"),
        ("int9.64.sym.fp16", "no levels 'int9'"),
        ("fp4.64.sym.fp16", "no levels 'fp4'"),
        ("INT4.64.sym.fp16", "no levels 'INT4'"),
        ("int4.0.sym.fp16", "blocks '0'"),
        ("int4.0x8.sym.fp16", "blocks '0x8'"),
        ("int4.8x0.sym.fp16", "blocks '8x0'"),
        ("int4.x8.sym.fp16", "blocks 'x8'"),
        ("int4.row.sym.fp16", "blocks 'row'"),
        ("int4.64.sym.fp8", "no dtype 'fp8'"),
        ("int4.64.sym.fp64", "no dtype 'fp64'"),
        ("uint4.64.shift.fp16.int8", "no dtype 'int8'"),
        ("int4.64.sym.fp16.fp16", "only a shift has a dtype"),
        ("int4.64.code.fp16.fp16", "only a shift has a dtype"),
        ("uint4.64.shift.one", "does not say how the shift is stored"),
        ("uint4.64.shift.[e4m3.tensor.sym.fp32]", "does not say how the shift is stored"),
        ("uint4.64.shift.one.fp16", "an unscaled grid has no zero"),
        ("int4.64.code.one", "an unscaled grid has no zero"),
        ("e4m3.64.code.fp16", "e4m3 levels with a zero"),
        ("nf4.64.shift.fp16", "nf4 levels with a zero"),
        ("uint4.64.code.fp16", "uint4 with a zero code is written int4"),
        ("int4.64.shift.fp16", "int4 with a shift"),
        ("int4.64.sym.[int8.8.code.fp16]", "scales on int8.8.code.fp16"),
        ("int4.64.sym.[nope]", "'nope' is not a grid"),
    ],
)
def test_strings_that_are_no_grid(text: str, says: str):
    with pytest.raises(GridError) as raised:
        Grid.parse(text)
    assert says in str(raised.value)


def test_a_grid_that_no_string_names_cannot_be_built():
    int4 = Int(4)
    with pytest.raises(GridError, match=r"stored in fp16, bf16, fp32, not torch\.float64"):
        Grid(int4, Blocks(1, 64), torch.float64)
    with pytest.raises(GridError, match="scales are stored in"):
        Grid(Int(4, signed=False), Blocks(1, 64), torch.float16, "shift", torch.float64)
    with pytest.raises(GridError, match="a shift needs a stored dtype"):
        Grid(Int(4, signed=False), Blocks(1, 64), torch.float16, "shift")
    with pytest.raises(GridError, match="a shift needs a stored dtype"):
        Grid(int4, Blocks(1, 64), torch.float16, "code", torch.float16)
    for rows, cols in ((0, 1), (1, 0), (-1, 64), (64, -1), (-2, -1), (1, -2)):
        with pytest.raises(GridError, match=f"blocks of {rows} rows and {cols} columns"):
            Blocks(rows, cols)


# Blocks


@pytest.mark.parametrize(
    ("blocks", "counts"),
    [
        (Blocks(-1, -1), (1, 1)),
        (Blocks(1, -1), (12, 1)),
        (Blocks(1, 8), (12, 4)),
        (Blocks(4, 16), (3, 2)),
        (Blocks(12, 32), (1, 1)),
        (Blocks(1, 1), (12, 32)),
    ],
    ids=str,
)
def test_how_many_blocks(blocks: Blocks, counts: tuple[int, int]):
    assert blocks.counts((12, 32)) == counts
    grid = Grid(Int(4), blocks, torch.float16)
    scale, _ = grid.fit(torch.ones(12, 32))
    assert isinstance(scale, torch.Tensor) and tuple(scale.shape) == counts


def test_a_block_holds_the_rectangle_it_says():
    w = torch.zeros(4, 6)
    w[0:2, 0:3], w[0:2, 3:6], w[2:4, 0:3], w[2:4, 3:6] = 7, 14, 21, 28
    scale, _ = Grid.parse("int4.2x3.sym.fp16").fit(w)
    assert isinstance(scale, torch.Tensor)
    assert scale.tolist() == [[1, 2], [3, 4]]


def test_misfits_name_the_nearest_sizes_that_fit():
    with pytest.raises(GridError) as raised:
        Blocks(1, 120).counts((4096, 11008))
    assert raised.value.what == "11008 columns do not divide into blocks of 120"
    assert raised.value.remedy == "Nearest column sizes that do: 64, 86, 128."


def test_misfits_of_both_axes_are_shown_together():
    with pytest.raises(GridError) as raised:
        Blocks(128, 64).counts((100, 176))
    expected = (
        "100 rows do not divide into blocks of 128 and 176 columns do not divide into blocks of 64"
    )
    assert raised.value.what == expected
    assert raised.value.remedy == (
        "Nearest row sizes that do: 50, 100. Nearest column sizes that do: 22, 44, 88."
    )


@pytest.mark.parametrize("size", [1, 7, 176, 360])
@pytest.mark.parametrize("block", [2, 5, 64, 400])
def test_near_divisors_divide_and_stand_around_the_block(size: int, block: int):
    near = near_divisors(size, block)
    assert near == sorted(near) and all(size % d == 0 for d in near) and block not in near
    assert len(near) <= 3 and near[0] < block
    between = range(near[-1] + 1, block) if near[-1] < block else range(block + 1, near[-1])
    assert not any(size % d == 0 for d in between)


# By hand


def test_a_symmetric_group():
    grid = Grid.parse("int4.4.sym.fp16")
    parts = grid.quantize(torch.tensor([[-8.0, 3.4, 0.5, 1.5]]))
    assert isinstance(parts.scale, torch.Tensor)
    assert (parts.codes.tolist(), parts.scale.tolist()) == ([[0, 11, 8, 10]], [[1]])
    assert grid.decode(parts, torch.float32).tolist() == [[-8, 3, 0, 2]]


def test_a_group_with_a_zero_code():
    grid = Grid.parse("int4.4.code.fp16")
    parts = grid.quantize(torch.tensor([[-10.0, 20.0, 0.0, 3.1]]))  # a step of 2, zero at 5
    assert isinstance(parts.scale, torch.Tensor) and parts.zero is not None
    assert (parts.scale.tolist(), parts.zero.tolist()) == ([[2]], [[5]])
    assert parts.codes.tolist() == [[0, 15, 5, 7]]
    assert grid.decode(parts, torch.float32).tolist() == [[-10, 20, 0, 4]]


def test_a_group_with_a_shift():
    grid = Grid.parse("uint4.4.shift.fp16")
    parts = grid.quantize(torch.tensor([[-10.0, 20.0, 0.0, 3.1]]))
    assert isinstance(parts.scale, torch.Tensor) and parts.zero is not None
    assert (parts.scale.tolist(), parts.zero.tolist()) == ([[2]], [[-10]])
    assert parts.codes.tolist() == [[0, 15, 5, 7]]
    assert parts.zero.dtype == torch.float16


def test_nvfp4_in_two_steps():
    """e2m1 in groups of 16; their scales on e4m3, whose own scale is the tensor's."""
    grid = Grid.parse("e2m1.16.sym.[e4m3.tensor.sym.fp32]")
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 16], w[0, 17] = 6 * 448 * 0.5, 6 * 1.1, 1.1
    parts = grid.quantize(w)
    assert isinstance(parts.scale, Parts) and isinstance(parts.scale.scale, torch.Tensor)
    assert float(parts.scale.scale) == 0.5  # 224 / 448
    assert parts.scale.codes.tolist() == [[0x7E, 0x41]]  # 448; 1.1 / 0.5 = 2.2, nearest is 2.25
    assert grid.scales(parts.scale).tolist() == [[224.0, 1.125]]
    decoded = grid.decode(parts, torch.float32)
    assert (decoded[0, 0], decoded[0, 16], decoded[0, 17]) == (1344.0, 6.75, 1.125)


def test_the_order_of_operations_is_the_grids():
    """(q - z) * s and q * s + b are other roundings, and encode rounds before it adds the zero."""
    s, w = torch.tensor([[0.1]]), torch.tensor([[0.85, 0.25, 0.35]])
    shifted, coded = Grid.parse("uint4.3.shift.fp32"), Grid.parse("int4.3.code.fp32")
    b, z = torch.tensor([[-0.7]]), torch.tensor([[7]], dtype=torch.uint8)
    f = np.float32
    q = shifted.encode(w, s, b)
    expected = [[float(f(c) * f(0.1) + f(-0.7)) for c in q[0].tolist()]]
    assert shifted.decode(Parts(q, s, b), torch.float32).tolist() == expected
    q = coded.encode(w, s, z)
    assert q.tolist() == [[round(float(f(x) / f(0.1))) + 7 for x in w[0].numpy()]]
    expected = [[float(f(c - 7) * f(0.1)) for c in q[0].tolist()]]
    assert coded.decode(Parts(q, s, z), torch.float32).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_eight_bit_codes_times_every_stored_scale_are_exact(dtype: torch.dtype):
    """The exactness theorem, exhaustively: a difference of codes has 9 bits, a scale at most 11."""
    s = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    s = s[s.isfinite() & (s > 0)].float()
    s = s[s < torch.finfo(torch.float32).max / 256]
    v = torch.arange(-255, 256, dtype=torch.float32)
    assert torch.equal((s[:, None] * v).double(), s.double()[:, None] * v.double())


# Refusals that depend on numbers


@pytest.mark.parametrize(
    ("name", "number", "noun", "wider"),
    [
        ("int2.8.sym.fp16", 1e6, "scale", "int2.8.sym.bf16"),
        ("int4.8.code.fp16", 2e6, "scale", "int4.8.code.bf16"),
        ("uint4.8.shift.fp16", 2e6, "scale", "uint4.8.shift.bf16"),
        ("uint4.8.shift.fp16", -1e5, "zero", "uint4.8.shift.bf16"),
        ("uint4.8.shift.fp32.fp16", -1e5, "zero", "uint4.8.shift.bf16"),
        ("uint4.8.shift.[e4m3.tensor.sym.fp32].fp16", -1e5, "zero", None),
    ],
)
def test_numbers_too_large_for_fp16_are_refused_with_a_grid_that_holds_them(
    name: str, number: float, noun: str, wider: str | None
):
    wider = wider or name.replace(".fp16", ".bf16")
    w = torch.zeros(1, 8)
    w[0, 3] = number
    with pytest.raises(GridError, match=rf"a {noun} of .* is too large for fp16, .* is 6.55e\+04"):
        Grid.parse(name).fit(w)
    with pytest.raises(GridError) as raised:
        Grid.parse(name).fit(w)
    assert raised.value.remedy == f"Store {noun}s in bf16 or fp32: {wider}."
    decoded = Grid.parse(wider).snap(w)
    assert abs(float(decoded[0, 3]) / number - 1) < 2**-3  # e4m3 scales may clip that much


@pytest.mark.parametrize(
    ("name", "lo", "hi"),
    [
        ("int4.8.sym.fp32", 0.0, 6e4),  # reaches down to -8 steps of 6e4 / 7
        ("int4.8.code.fp32", -6.5e4, 3.7e4),  # steps of 6800, zero at 10
        ("uint4.8.shift.fp32", -65504.0, 65600.0),
        ("e4m3.8.sym.[e8m0.tensor.sym.one]", 0.0, 448 * 200.0),  # a scale of 256
    ],
)
def test_a_grid_that_leaves_the_compute_dtype_is_refused(name: str, lo: float, hi: float):
    grid = Grid.parse(name)
    w = torch.zeros(1, 8)
    w[0, 0], w[0, 1] = lo, hi
    with pytest.raises(GridError, match=r"not finite in torch\.float16") as raised:
        grid.fit(w, torch.float16)
    assert raised.value.remedy == "Compute in bfloat16 or float32."
    for dtype in (torch.bfloat16, torch.float32):
        assert bool(grid.decode(grid.quantize(w, dtype), dtype).isfinite().all())
    grid.fit(w / 2, torch.float16)


def test_the_compute_dtype_is_the_matrixs_own_unless_said():
    grid, w = Grid.parse("int4.8.sym.fp32"), torch.full((1, 8), 6e4)
    grid.fit(w)
    with pytest.raises(GridError):
        grid.fit(w.half())
    with pytest.raises(GridError):
        grid.fit(w, torch.float16)
    grid.fit(w.half(), torch.float32)


def test_negative_numbers_on_levels_that_have_none_are_refused():
    w = torch.tensor([[1.0, 2.0, -0.25, 15.0]])
    with pytest.raises(GridError, match=r"uint4 levels reach from 0 up, .* down to -0.25"):
        Grid.parse("uint4.4.sym.fp16").fit(w)
    assert Grid.parse("uint4.4.sym.fp16").snap(w.abs()).tolist() == [[1, 2, 0, 15]]


# Small scales


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")]
)
def test_a_scale_below_the_smallest_becomes_one_and_its_block_vanishes(
    dtype: torch.dtype, name: str
):
    grid = Grid.parse(f"int4.4.sym.{name}")
    least = smallest_scale(dtype)
    assert least == (2**-24 if dtype == torch.float16 else 2**-126)
    w = torch.tensor([[7 * least, 0, 0, 0], [7 * least * 0.49, 0, 0, 0], [0, 0, 0, 0]])
    parts = grid.quantize(w, torch.float32)
    assert isinstance(parts.scale, torch.Tensor)
    assert parts.scale.flatten().tolist() == [least, 1, 1]
    assert torch.equal(grid.decode(parts, torch.float32)[1:], torch.zeros(2, 4))
    assert float(grid.decode(parts, torch.float32)[0, 0]) == 7 * least
    assert grid.vanished(w, parts) == 1


def test_a_subnormal_scale_is_rounded_up():
    """Rounding 1.49 of the smallest number down to 1 would clip a block by a third."""
    grid, unit = Grid.parse("int4.4.sym.fp16"), 2.0**-24
    w = torch.tensor(
        [[7 * 1.49 * unit, 0, 0, 0], [7 * 5.2 * unit, 0, 0, 0], [7 * 3 * unit, 0, 0, 0]]
    )
    scale, _ = grid.fit(w)
    assert isinstance(scale, torch.Tensor)
    assert (scale.float() / unit).flatten().tolist() == [2, 6, 3]


def test_vanished_counts_blocks_not_numbers_and_no_zeros():
    grid = Grid.parse("int4.2x4.sym.fp16")
    w = torch.zeros(4, 8)
    w[0, 0], w[1, 2] = 1e-9, -1e-9  # one block, two numbers
    w[2, 5], w[3, 7] = 1e-9, 1.0  # not alone in its block
    assert grid.vanished(w, grid.quantize(w)) == 1
    assert grid.vanished(torch.zeros(4, 8), grid.quantize(torch.zeros(4, 8))) == 0
    fp32 = Grid.parse("int4.2x4.sym.fp32")
    assert fp32.vanished(w, fp32.quantize(w)) == 0
