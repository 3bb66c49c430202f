"""Gradients against the closed forms of ops.py, in float64; every kind of weight on every grid."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laws.oracle import level_values
from laws.table import GRIDS, WEIGHTS, disturb, example
from ongrid.calibrate.signround import RoundedWeight
from ongrid.grid import Grid, Parts, QTensor, ops
from ongrid.nn import AbstractWeight, LatentWeight
from ongrid.tune.qalora import ShiftedWeight

each = pytest.mark.parametrize("name", GRIDS)
each_kind = pytest.mark.parametrize("kind", WEIGHTS)


def ask(weight: AbstractWeight) -> None:
    """Every parameter asks for a gradient."""
    for p in weight.parameters():
        p.requires_grad_()


def gradient(weight: AbstractWeight, name: str) -> Tensor:
    found = weight.get_parameter(name).grad
    assert found is not None
    return found


@torch.no_grad()
def closed_form(
    weight: AbstractWeight, q: QTensor, d: Tensor, size: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradient of every parameter from that of the decoded weight q, float64, and the magnitudes
    that were added up for it, from those of d: what rounding errors are relative to.
    """
    grid = weight.grid
    s = grid.scales(q.parts.scale).double()
    values = torch.from_numpy(level_values(grid.levels.name))
    levels = values[values.isnan().logical_not()].unique()
    v, z = values[q.codes.long()], torch.zeros((), dtype=torch.float64)
    wide_s = spread(q, s)
    if q.parts.zero is not None:
        stored = values[q.parts.zero.long()] if grid.zero == "code" else q.parts.zero.double()
        z = spread(q, stored)
    offset, shift = (z, z * 0) if grid.zero == "code" else (z * 0, z)
    u, inside = torch.zeros_like(v), torch.zeros_like(v)  # fixed codes move with nothing
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if isinstance(weight, LatentWeight):
        u = (weight.latent.double() - shift) / wide_s
        level = u.round() + offset if grid.zero == "code" else u
        inside = unclamped(grid, levels, level).double()
        found["latent"] = d * inside, size + 2**-128 / wide_s  # d * s may be subnormal
    o = torch.zeros_like(v)
    if isinstance(weight, RoundedWeight):
        o = weight.offset.double()
        u = (weight.latent.double() - shift) / wide_s + o
        level = u.round() + offset if grid.zero == "code" else u
        inside = unclamped(grid, levels, level).double()
        found["offset"] = d * inside * wide_s, size * wide_s + 2**-128
        u = u - o  # which moves with s: s * o was added
    terms = {"scale": d * (v - offset - inside * u)}
    if grid.zero == "code":
        terms["zero"] = -d * wide_s * (1 - inside)
    if grid.zero == "shift":
        terms["zero"] = d * (1 - inside)
    # The sums cancel: each term came as a difference of two.
    u = torch.where(inside > 0, u, 0)
    sizes = {
        "scale": size * (v.abs() + u.abs() + o.abs() + offset.abs()),
        "zero": size * (wide_s + 1),
    }
    found |= {n: (summed(q, t), summed(q, sizes[n])) for n, t in terms.items()}
    if isinstance(weight, ShiftedWeight):
        found |= of_adapter(weight, s, found)
    if isinstance(weight, RoundedWeight):
        return {"offset": found["offset"], **of_shares(weight, found)}
    if isinstance(weight.scale, AbstractWeight):
        assert isinstance(q.parts.scale, Parts) and isinstance(grid.scale, Grid)
        inner = QTensor(grid.scale, q.parts.scale)
        of_scales = closed_form(weight.scale, inner, *found.pop("scale"))
        found |= {f"scale.{n}": pair for n, pair in of_scales.items()}
    return found


def of_shares(
    weight: RoundedWeight, found: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of the shares a, b from those of the scale and the zero: s = (a hi - b lo) / width, and the
    zero is -b lo / s or b lo.
    """
    if weight.up is None:
        return {}
    grid, (scale, zero) = weight.grid, weight.start.stored_range()
    assert isinstance(scale, Tensor)
    (ds, size_s), (dz, size_z) = found["scale"], found.get("zero", found["scale"])
    s0 = scale.double()
    if zero is None or weight.down is None:
        return {"up": (ds * s0, size_s * s0)}
    width, z0, shift = 2**grid.levels.bits - 1, zero.double(), grid.zero == "shift"
    lo = z0 if shift else -z0 * s0
    hi, a, b = lo + width * s0, weight.up.double(), weight.down.double()
    s = (a * hi - b * lo) / width
    of_s = dz * 0 if shift else dz * b * lo / s**2
    of_b = dz * lo if shift else -dz * lo / s
    size = size_s + (0 if shift else size_z * (b * lo / s**2).abs())
    return {
        "up": ((ds + of_s) * hi / width, size * hi.abs() / width),
        "down": (
            -(ds + of_s) * lo / width + of_b,
            size * lo.abs() / width + size_z * (lo if shift else lo / s).abs(),
        ),
    }


def of_adapter(
    weight: ShiftedWeight, s: Tensor, found: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of an adapter from those of the zeros: z - steps, or b + s * steps, steps = factor * b a."""
    (dz, size), a, b = found["zero"], weight.a.double(), weight.b.double()
    steps = weight.factor * b @ a
    of_steps, size_of_steps = (-dz, size) if weight.grid.zero == "code" else (dz * s, size * s)
    adapter = {
        "b": tuple(weight.factor * g @ f.T for g, f in ((of_steps, a), (size_of_steps, a.abs()))),
        "a": tuple(weight.factor * f.T @ g for g, f in ((of_steps, b), (size_of_steps, b.abs()))),
    }
    if weight.grid.zero == "shift":
        ds, size_of_s = found["scale"]
        adapter["scale"] = (ds + dz * steps, size_of_s + size * steps.abs())
    return {name: (value, bound) for name, (value, bound) in adapter.items()}


def unclamped(grid: Grid, levels: Tensor, x: Tensor) -> Tensor:
    """Whether the outermost levels are at most half a step away; of integers, after rounding."""
    if grid.levels.name.lstrip("u").startswith("int"):
        return (x.round() >= levels[0]) & (x.round() <= levels[-1])
    below, above = (levels[1] - levels[0]) / 2, (levels[-1] - levels[-2]) / 2
    return (x >= levels[0] - below) & (x <= levels[-1] + above)


def spread(q: QTensor, t: Tensor) -> Tensor:
    """One number of each block, for each number of the matrix."""
    rows, cols = t.shape if t.dim() else (1, 1)
    t = t.reshape(rows, cols).repeat_interleave(q.shape[0] // rows, 0)
    if q.order is not None:
        return t[:, q.order.long()]
    return t.repeat_interleave(q.shape[1] // cols, 1)


def summed(q: QTensor, t: Tensor) -> Tensor:
    """The sum over every block, `[R C]`."""
    rows, cols = q.grid.blocks.counts(q.shape)
    t = t.reshape(rows, q.shape[0] // rows, q.shape[1]).sum(1)
    if q.order is None:
        return t.reshape(rows, cols, -1).sum(2)
    return torch.stack([t[:, q.order == c].sum(1) for c in range(cols)], 1)


def assert_close(weight: AbstractWeight, d: Tensor) -> None:
    """Within float32: 2**-24 for each of a few operations, and for each number of a sum, of the
    magnitudes that were added.
    """
    weight().backward(d)
    expected = closed_form(weight, weight.freeze(), d.double(), d.double().abs())
    parameters = dict(weight.named_parameters())
    assert parameters.keys() <= expected.keys()
    for name, p in parameters.items():
        assert p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype
        value, size = expected[name]
        bound = size * 2**-20 + 1e-30
        off = (p.grad.double() - value).abs()
        assert bool((off <= bound).all()), f"{name}: {float((off / bound).max())} times the bound"


@each_kind
@each
def test_gradients_are_the_closed_forms(name: str, kind: str):
    grid = Grid.parse(name)
    for seed in range(2):
        weight = WEIGHTS[kind](grid, torch.float32)
        if seed:  # the first is as fitted
            disturb(weight, seed)
        ask(weight)
        generator = torch.Generator().manual_seed(seed)
        if any(True for _ in weight.parameters()):
            assert_close(weight, torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize("name", [n for n in GRIDS if Grid.parse(n).zero != "code"])
def test_plain_rounding_clamps_nothing(name: str):
    """The largest numbers of a block lie on the outermost levels, or a rounding of their scale
    beyond, and move all the same: a group whose outlier is stuck trains badly.
    """
    grid = Grid.parse(name)
    if not isinstance(grid.scale, torch.dtype) or torch.bfloat16 in (grid.scale, grid.zero_dtype):
        return  # these scales may clip by more than half a step
    if grid.levels.name == "e8m0":
        return  # has zero beyond its lowest level
    weight = LatentWeight(grid, example(grid))
    ask(weight)
    weight().sum().backward()
    assert float((gradient(weight, "latent") - 1).abs().max()) <= 2**-22


BOUNDS = [
    # levels, then numbers in steps and whether they move
    ("int4.1.sym.fp32", {7.0: 1, 7.25: 1, 7.5: 0, 8.0: 0, -8.0: 1, -8.5: 1, -8.75: 0, 0.0: 1}),
    ("int2.1.code.fp32", {3.0: 1, 3.25: 1, 3.5: 0, 4.0: 0, 0.0: 1, -0.5: 1, -0.75: 0}),
    ("uint4.1.shift.fp32", {15.0: 1, 15.25: 1, 15.5: 0, 0.0: 1, -0.5: 1, -0.75: 0}),
    ("e2m1.1.sym.fp32", {6.0: 1, 6.9: 1, 7.1: 0, -6.0: 1, -7.1: 0, 1e30: 0, -1e30: 0}),
    ("e4m3.1.sym.fp32", {448.0: 1, 463.0: 1, 465.0: 0, -448.0: 1, -465.0: 0}),
    ("nf4.1.sym.fp32", {1.0: 1, 1.1: 1, 1.2: 0, -1.0: 1, -1.1: 1, -1.2: 0}),
]


@pytest.mark.parametrize(("name", "numbers"), BOUNDS)
def test_the_outermost_levels_themselves_are_inside(name: str, numbers: dict[float, int]):
    """Worked out by hand: D = 3, a scale of 1/4, and a zero where there is one."""
    grid, d, s = Grid.parse(name), 3.0, 0.25
    zero = {"code": torch.tensor(2.0), "shift": torch.tensor(-5.0)}.get(grid.zero or "")
    w = torch.tensor([list(numbers)]) * s
    if grid.zero == "code":
        w -= 2 * s  # counted from the lowest code
    if grid.zero == "shift":
        w -= 5
    weight = LatentWeight(grid, torch.ones_like(w))
    with torch.no_grad():
        weight.latent.copy_(w)
        weight.get_parameter("scale").fill_(s)
        if zero is not None:
            weight.get_parameter("zero").fill_(zero)
    ask(weight)
    weight().backward(torch.full_like(w, d))
    inside = torch.tensor([list(numbers.values())], dtype=torch.float32)
    assert torch.equal(gradient(weight, "latent"), d * inside)
    if grid.zero == "code":
        assert torch.equal(gradient(weight, "zero"), -d * s * (1 - inside))
    if grid.zero == "shift":
        assert torch.equal(gradient(weight, "zero"), d * (1 - inside))


def test_stored_roundings_pass_gradients_straight_through():
    s = torch.tensor([[0.1, -5.0, 1e9, 1e-12]], requires_grad=True)
    d = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    ops.store_scale(s, "int4.8.sym.fp16").backward(d)
    assert s.grad is not None and torch.equal(s.grad, d)
    for grid in ("int4.8.code.fp16", "uint4.8.shift.fp16"):
        z = torch.tensor([[0.1, -5.0, 1e9, math.pi]], requires_grad=True)
        ops.store_zero(z, grid).backward(d)
        assert z.grad is not None and torch.equal(z.grad, d)
    x = torch.randn(2, 8, requires_grad=True)
    ops.snap(x, "int8.channel.sym.fp32").backward(torch.ones(2, 8))
    assert x.grad is not None and torch.equal(x.grad, torch.ones(2, 8))


def test_scales_stay_positive_and_come_back():
    """A scale that training pushed below zero is stored as the smallest, and still learns."""
    weight = LatentWeight(Grid.parse("int4.8.sym.fp16"), torch.randn(1, 8))
    scale = weight.get_parameter("scale")
    with torch.no_grad():
        scale.fill_(-1.0)
    scale.requires_grad_()
    stored = weight.parts().scale
    assert isinstance(stored, Tensor) and stored.tolist() == [[2**-24]]
    weight().abs().sum().backward()
    assert scale.grad is not None and float(scale.grad) != 0


@pytest.mark.parametrize("name", ["int4.8.sym.[int8.4.sym.fp16]", "int4.8.sym.[e4m3.4.sym.fp32]"])
def test_scales_on_a_grid_stay_positive(name: str):
    """A scale at zero divides zeros by zero, and what is computed is then not what is stored."""
    grid = Grid.parse(name)
    weight = LatentWeight(grid, torch.randn(2, 32))
    with torch.no_grad():
        weight.latent[0] = 0
        weight.get_parameter("scale.latent")[0] = torch.tensor([0.0, -1.0, 1e-12, 1.0])
        weight.get_parameter("scale.scale").fill_(-1.0)
    parts = weight.freeze().parts
    assert isinstance(parts.scale, Parts)
    assert bool((grid.scales(parts.scale) > 0).all())
    assert torch.equal(weight(), weight.freeze().dequantize(torch.float32))
    assert bool(weight().isfinite().all())


@each
def test_gradients_in_narrow_models_stay_fp32_in_the_masters(name: str):
    grid = Grid.parse(name)
    weight = LatentWeight(grid, example(grid, torch.bfloat16))
    ask(weight)
    for n, p in weight.named_parameters():
        assert p.dtype == (torch.bfloat16 if n == "latent" else torch.float32)
    weight().sum().backward()
    for p in weight.parameters():
        assert p.grad is not None and p.grad.dtype == p.dtype
        assert bool(p.grad.isfinite().all())
