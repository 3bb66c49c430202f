"""The registered ops: encode, decode and storing, opaque to compilers, with straight-through
gradients.

A compiler must not look into a rounding. Inductor deletes an fp32 -> fp16 -> fp32 cast chain, may
contract a product and a sum, and may keep more digits than a stored dtype has; each of these makes
a compiled forward differ from the stored weights. Autocast may change the dtype of an operation.
Inside a registered op neither happens: eager, compiled and under autocast run the same code.

Gradients are those of LSQ and EfficientQAT (Esser et al., 2020, eq. 3; Chen et al., 2024), with
u = w / s (or (w - b) / s), D the gradient of the decoded weight, inside = the code was not clamped:

    dw = D * inside        ds = sum D * (v(q) - v(z) - inside * u)      dz = -sum D * s * not inside
    for a shift b:         ds = sum D * (v(q) - inside * u)             db =  sum D * not inside

obtained by giving `encode` a gradient with respect to the level and letting `decode` send it.
"""

# No `from __future__ import annotations` here: an op's schema is read from its annotations, which a
# decorated function (the tests check types by decorating) has to carry as types, not as strings.
from typing import Any

import torch
from torch import Tensor

from ongrid.grid.bits import unpack as bit_unpack
from ongrid.grid.grid import (
    Grid,
    block_counts,
    decode_values,
    encode_values,
    grouped,
    smallest_scale,
    spread,
)

# Compilers keep graphs on disk under the names of the ops in them, and a graph holds what a
# gradient was traced to. So the names change whenever a schema or a gradient of an op does: a graph
# that an earlier ongrid left on a machine is then never run by this one.
NAMESPACE = "ongrid_2"


@torch.library.custom_op(f"{NAMESPACE}::encode", mutates_args=())
def encode(w: Tensor, s: Tensor, z: Tensor | None, order: Tensor | None, grid: str) -> Tensor:
    """Codes of w as float32 `[out in]`, from float32 scales `[R C]` and stored zeros."""
    return encode_values(Grid.parse(grid), w, s, z, order).contiguous()


@torch.library.custom_op(f"{NAMESPACE}::decode", mutates_args=())
def decode(
    q: Tensor, s: Tensor, z: Tensor | None, order: Tensor | None, grid: str, dtype: torch.dtype
) -> Tensor:
    """The weight `[out in]` in `dtype` that codes stand for, rounded once from float32."""
    return decode_values(Grid.parse(grid), q, s, z, order, dtype).contiguous()


@torch.library.custom_op(f"{NAMESPACE}::store_scale", mutates_args=())
def store_scale(s: Tensor, grid: str) -> Tensor:
    """Scales `[R C]` rounded to their stored dtype, as float32; the gradient passes straight
    through.

    Scales that left the positive numbers during training are stored as the smallest positive one,
    and keep their gradient, so that they can come back.
    """
    parsed = Grid.parse(grid)
    if not isinstance(parsed.scale, torch.dtype):
        raise ValueError(f"{grid} stores no scale in a dtype")
    least, most = smallest_scale(parsed.scale), torch.finfo(parsed.scale).max
    return s.float().clamp(least, most).to(parsed.scale).float().contiguous()


@torch.library.custom_op(f"{NAMESPACE}::store_zero", mutates_args=())
def store_zero(z: Tensor, grid: str) -> Tensor:
    """Zeros `[R C]` in their stored form, as float32; the gradient passes straight through.

    A shift that left its stored dtype during training takes the dtype's largest number.
    """
    return _stored_zero(Grid.parse(grid), z.float())


def _stored_zero(grid: Grid, z: Tensor) -> Tensor:
    if grid.zero_dtype is not None:
        most = torch.finfo(grid.zero_dtype).max
        z = z.clamp(-most, most)
    stored = grid.store_zero(z)
    assert stored is not None
    return stored.to(torch.float32, copy=True).contiguous()


@torch.library.custom_op(f"{NAMESPACE}::low_rank", mutates_args=())
def low_rank(b: Tensor, a: Tensor, factor: float) -> Tensor:
    """factor * (b a) `[R C]`, float32, for b `[R rank]` and a `[rank C]`.

    One rank after the other, so that the sum has one order in every process and on every machine: a
    matrix product chooses its own, and a last digit decides how a zero rounds.
    """
    total = torch.zeros(b.shape[0], a.shape[1], dtype=torch.float32, device=b.device)
    for column, row in zip(b.float().T, a.float(), strict=True):
        total += column[:, None] * row
    return total.mul_(factor)


@torch.library.custom_op(f"{NAMESPACE}::move_zero", mutates_args=())
def move_zero(z: Tensor, steps: Tensor, s: Tensor, grid: str) -> Tensor:
    """Stored zeros after all weights of a block went up by `steps` `[R C]` steps of size s, as
    float32; the gradient passes straight through rounding and clamping.

    A code falls by the steps, and is rounded and clamped; a shift rises by steps * s.
    """
    parsed = Grid.parse(grid)
    moved = z.float() - steps if parsed.zero == "code" else z.float() + steps * s
    return _stored_zero(parsed, moved)


@torch.library.custom_op(f"{NAMESPACE}::offset", mutates_args=())
def offset(w: Tensor, o: Tensor, s: Tensor) -> Tensor:
    """w + o * s, float32 `[out in]`: weights moved by offsets in steps of the grid."""
    steps = grouped(o.float().contiguous(), *block_counts(s, None)) * spread(s, None)
    return steps.reshape(w.shape).add_(w.float())


@torch.library.custom_op(f"{NAMESPACE}::shrink", mutates_args=())
def shrink(
    s: Tensor, z: Tensor | None, up: Tensor, down: Tensor | None, grid: str
) -> tuple[Tensor, Tensor]:
    """The scale and the zero, before rounding, of blocks that cover a share of their range.

    From stored scales s and zeros z `[R C]`, whose grid reaches from lo to hi, they are those of
    the range from down * lo to up * hi, float32. Without a zero the scale is up * s, and the second
    result is empty. Shares of 1 give s and z themselves.
    """
    s_new, z_new, *_ = _shrunk(Grid.parse(grid), s, z, up, down)
    return s_new.clone(), s.new_empty(0) if z_new is None else z_new.clone()


def _shrunk(
    grid: Grid, s: Tensor, z: Tensor | None, up: Tensor, down: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The scale, the zero, and the derivatives of the scale by `up` and `down`."""
    if z is None or down is None:
        return up * s, None, s, s
    width = grid.levels.hi - grid.levels.lo
    lo, hi = (z, z + width * s) if grid.zero == "shift" else (-z * s, (width - z) * s)
    by_up, by_down = hi / width, -lo / width
    s_new = s - ((1 - up) * by_up + (1 - down) * by_down)
    z_new = down * lo if grid.zero == "shift" else down * (z * (s / s_new))
    return s_new, z_new, by_up, by_down


@torch.library.custom_op(f"{NAMESPACE}::positive", mutates_args=())
def positive(q: Tensor, grid: str) -> Tensor:
    """Positive scales' codes on their own grid; the gradient passes straight through."""
    return Grid.parse(grid).positive_codes(q).contiguous()


@torch.library.custom_op(f"{NAMESPACE}::snap", mutates_args=())
def snap(x: Tensor, grid: str) -> Tensor:
    """x `[out in]` rounded to a grid fitted to x itself; the gradient passes straight through.

    The fitted range covers x, so no number is clamped and the straight-through gradient is 1.
    """
    return Grid.parse(grid).snap(x).contiguous()


@torch.library.custom_op(f"{NAMESPACE}::unpack", mutates_args=())
def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Codes uint8 `[out n]` from their packed bytes `[out bytes]`."""
    return bit_unpack(packed, bits, n)


# What a compiler is told: results are contiguous, whatever the arguments are.


def _empty(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return t.new_empty(t.shape, dtype=dtype or t.dtype)


@snap.register_fake
@positive.register_fake
def _(x: Tensor, grid: str) -> Tensor:
    return _empty(x)


@unpack.register_fake
def _(packed: Tensor, bits: int, n: int) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], n))


@encode.register_fake
def _(w: Tensor, s: Tensor, z: Tensor | None, order: Tensor | None, grid: str) -> Tensor:
    return _empty(w, torch.float32)


@decode.register_fake
def _(
    q: Tensor, s: Tensor, z: Tensor | None, order: Tensor | None, grid: str, dtype: torch.dtype
) -> Tensor:
    return _empty(q, dtype)


@low_rank.register_fake
def _(b: Tensor, a: Tensor, factor: float) -> Tensor:
    return b.new_empty((b.shape[0], a.shape[1]), dtype=torch.float32)


@move_zero.register_fake
def _(z: Tensor, steps: Tensor, s: Tensor, grid: str) -> Tensor:
    return _empty(z, torch.float32)


@offset.register_fake
def _(w: Tensor, o: Tensor, s: Tensor) -> Tensor:
    return _empty(w, torch.float32)


@shrink.register_fake
def _(
    s: Tensor, z: Tensor | None, up: Tensor, down: Tensor | None, grid: str
) -> tuple[Tensor, Tensor]:
    return _empty(s), _like_zero(s, z)


@store_scale.register_fake
@store_zero.register_fake
def _(x: Tensor, grid: str) -> Tensor:
    return _empty(x, torch.float32)


# The gradients are ops as well: a compiler would trace them otherwise, and sum in another order.
# An op returns tensors, never None: a gradient that nobody needs is empty. Sums run over contiguous
# copies: their order, and so their last digit, would follow the layout otherwise.


@torch.library.custom_op(f"{NAMESPACE}::encode_backward", mutates_args=())
def encode_backward(
    dv: Tensor, w: Tensor, s: Tensor, z: Tensor | None, order: Tensor | None, grid: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of w, s and z from those of the levels."""
    g = Grid.parse(grid)
    counts, wide = block_counts(s, order), spread(s, order)
    u = grouped(w.float().contiguous(), *counts)
    u = u / wide if z is None or g.zero == "code" else (u - spread(z.float(), order)) / wide
    level = u
    if z is not None and g.zero == "code":
        level = u.round() + g.levels.value(spread(z, order))
    inside = g.levels.unclamped(level)
    d = grouped(dv.float().contiguous(), *counts) * inside
    u = u.masked_fill_(~inside, 0)  # it may be infinite, and 0 * infinity is NaN
    dz = d.new_empty(0)
    if z is not None:
        dz = _reduced(d, s, order)
        dz = (dz if g.zero == "code" else -dz / s).to(z.dtype)
    dw = (d / wide).reshape(w.shape).to(w.dtype)
    return dw, -_reduced(u.mul_(d), s, order) / s, dz


@torch.library.custom_op(f"{NAMESPACE}::decode_backward", mutates_args=())
def decode_backward(
    dw: Tensor,
    q: Tensor,
    s: Tensor,
    z: Tensor | None,
    order: Tensor | None,
    grid: str,
    of_codes: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the levels, s and z from those of the decoded weight.

    That of the levels is empty unless it is asked for with `of_codes`.
    """
    g = Grid.parse(grid)
    counts, wide = block_counts(s, order), spread(s, order)
    d, v = grouped(dw.float().contiguous(), *counts), grouped(q.contiguous(), *counts)
    dz = d.new_empty(0)
    if z is not None:
        dz = _reduced(d, s, order)
        dz = (-dz * s if g.zero == "code" else dz).to(z.dtype)
    # A difference of codes is that of their levels.
    v = g.levels.value(v) if z is None or g.zero != "code" else v - spread(z.float(), order)
    dq = (d * wide).reshape(q.shape) if of_codes else d.new_empty(0)
    return dq, _reduced(d * v, s, order), dz


@torch.library.custom_op(f"{NAMESPACE}::low_rank_backward", mutates_args=())
def low_rank_backward(d: Tensor, b: Tensor, a: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Gradients of b and a."""
    d = d.float().contiguous() * factor
    return (d @ a.float().T).to(b.dtype), (b.float().T @ d).to(a.dtype)


@torch.library.custom_op(f"{NAMESPACE}::move_zero_backward", mutates_args=())
def move_zero_backward(
    d: Tensor, steps: Tensor, s: Tensor, grid: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the zeros, the steps and the scales."""
    d = d.float()
    if Grid.parse(grid).zero == "code":
        return d.clone(), -d, torch.zeros_like(s)
    return d.clone(), d * s, d * steps


@torch.library.custom_op(f"{NAMESPACE}::offset_backward", mutates_args=())
def offset_backward(d: Tensor, o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the offsets and the scales; that of the weights is d itself."""
    counts = block_counts(s, None)
    blocks = grouped(d.contiguous(), *counts)
    ds = _reduced(blocks * grouped(o.float().contiguous(), *counts), s, None)
    return (blocks * spread(s, None)).reshape(o.shape), ds


@torch.library.custom_op(f"{NAMESPACE}::shrink_backward", mutates_args=())
def shrink_backward(
    ds: Tensor, dz: Tensor, s: Tensor, z: Tensor | None, up: Tensor, down: Tensor | None, grid: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the shares."""
    parsed = Grid.parse(grid)
    s_new, z_new, by_up, by_down = _shrunk(parsed, s, z, up, down)
    if z is None or z_new is None:
        return ds * s, s.new_empty(0)
    if parsed.zero == "shift":
        return ds * by_up, ds * by_down + dz * z
    # z_new = down * z * s / s_new
    through = ds - dz * z_new / s_new
    return through * by_up, through * by_down + dz * (z * (s / s_new))


@offset_backward.register_fake
def _(d: Tensor, o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(o), _empty(s)


@shrink_backward.register_fake
def _(
    ds: Tensor, dz: Tensor, s: Tensor, z: Tensor | None, up: Tensor, down: Tensor | None, grid: str
) -> tuple[Tensor, Tensor]:
    return _empty(s), _like_zero(s, z)


@low_rank_backward.register_fake
def _(d: Tensor, b: Tensor, a: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return _empty(b), _empty(a)


@move_zero_backward.register_fake
def _(d: Tensor, steps: Tensor, s: Tensor, grid: str) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(d, torch.float32), _empty(d, torch.float32), _empty(s)


@encode_backward.register_fake
def _(
    dv: Tensor, w: Tensor, s: Tensor, z: Tensor | None, order: Tensor | None, grid: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(w), _empty(s), _like_zero(s, z)


@decode_backward.register_fake
def _(
    dw: Tensor,
    q: Tensor,
    s: Tensor,
    z: Tensor | None,
    order: Tensor | None,
    grid: str,
    of_codes: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = _empty(dw, torch.float32) if of_codes else s.new_empty(0)
    return dq, _empty(s), _like_zero(s, z)


def _like_zero(s: Tensor, z: Tensor | None) -> Tensor:
    return s.new_empty(0) if z is None else _empty(z)


# What follows has the signatures that autograd asks for: a context, inputs as a tuple, gradients.


def _keep_encode(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.grid = inputs
    ctx.save_for_backward(*tensors)


def _keep_decode(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.grid, _ = inputs
    ctx.save_for_backward(*tensors)


def _encode_backward(ctx: Any, dv: Tensor) -> tuple[Tensor | None, ...]:
    return (*_needed(ctx, encode_backward(dv, *ctx.saved_tensors, ctx.grid)), None, None)


def _decode_backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
    of_codes = ctx.needs_input_grad[0]
    found = decode_backward(dw, *ctx.saved_tensors, ctx.grid, of_codes)
    return (*_needed(ctx, found), None, None, None)


def _keep_low_rank(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    b, a, ctx.factor = inputs
    ctx.save_for_backward(b, a)


def _low_rank_backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    return (*_needed(ctx, low_rank_backward(d, *ctx.saved_tensors, ctx.factor)), None)


def _keep_move_zero(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, steps, s, ctx.grid = inputs
    ctx.save_for_backward(steps, s)


def _move_zero_backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    return (*_needed(ctx, move_zero_backward(d, *ctx.saved_tensors, ctx.grid)), None)


def _keep_offset(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, o, s = inputs
    ctx.save_for_backward(o, s)


def _offset_backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(_needed(ctx, (d, *offset_backward(d, *ctx.saved_tensors))))


def _keep_shrink(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.grid = inputs
    ctx.save_for_backward(*tensors)


def _shrink_backward(ctx: Any, ds: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
    up, down = shrink_backward(ds, dz, *ctx.saved_tensors, ctx.grid)
    return None, None, up, down if ctx.needs_input_grad[3] else None, None


def _needed(ctx: Any, gradients: tuple[Tensor, ...]) -> list[Tensor | None]:
    return [
        gradient if need else None
        for gradient, need in zip(gradients, ctx.needs_input_grad, strict=False)
    ]


def _reduced(d: Tensor, s: Tensor, order: Tensor | None) -> Tensor:
    """Sums a grouped gradient over each block: `[R C]`, the shape of s."""
    blocks = d.sum((1, 3))
    if order is None:
        return blocks.reshape(s.shape)
    return torch.zeros_like(s).index_add_(1, order.long(), blocks)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...


def _straight_through(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
    return d, None


encode.register_autograd(_encode_backward, setup_context=_keep_encode)
decode.register_autograd(_decode_backward, setup_context=_keep_decode)
low_rank.register_autograd(_low_rank_backward, setup_context=_keep_low_rank)
move_zero.register_autograd(_move_zero_backward, setup_context=_keep_move_zero)
offset.register_autograd(_offset_backward, setup_context=_keep_offset)
shrink.register_autograd(_shrink_backward, setup_context=_keep_shrink)
positive.register_autograd(_straight_through, setup_context=_keep_nothing)
snap.register_autograd(_straight_through, setup_context=_keep_nothing)
store_scale.register_autograd(_straight_through, setup_context=_keep_nothing)
store_zero.register_autograd(_straight_through, setup_context=_keep_nothing)
