"""The library's arithmetic written a second time: numpy, plain loops over blocks, nothing shared.

Levels are found by brute force in float64, stored dtypes are rounded on bit patterns, and a scale's
grid is quantized by the same function again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ongrid.grid import Grid, Parts
from ongrid.grid.levels import NF4

Array = Any  # numpy's own generics say nothing about dtype and shape here


class Result(NamedTuple):
    codes: Array
    scale: Array | Result | None
    zero: Array | None
    numbers: Array  # decoded, float32


def float_values(exponent: int, mantissa: int, specials: int) -> list[float]:
    bias, half = 2 ** (exponent - 1) - 1, []
    for e in range(2**exponent):
        for m in range(2**mantissa):
            leading, power = (1, e - bias) if e else (0, 1 - bias)
            half.append((leading * 2**mantissa + m) * 2.0 ** (power - mantissa))
    half = half[: len(half) - specials] + [np.nan] * specials
    return half + [-v for v in half]


def level_values(name: str) -> Array:
    """The value of every code, float64."""
    if name.startswith("int"):
        return np.arange(2 ** int(name[3:]), dtype=np.float64) - 2 ** (int(name[3:]) - 1)
    if name.startswith("uint"):
        return np.arange(2 ** int(name[4:]), dtype=np.float64)
    floats = {"e4m3": (4, 3, 1), "e5m2": (5, 2, 4), "e2m1": (2, 1, 0), "e3m2": (3, 2, 0)}
    floats["e2m3"] = (2, 3, 0)
    if name in floats:
        return np.array(float_values(*floats[name]))
    if name == "e8m0":
        return np.array([2.0 ** (c - 127) for c in range(255)] + [np.nan])
    if name == "nf4":  # the published digits; tests/grid/test_levels.py computes them anew
        return np.array(NF4.values)
    if name == "iq4nl":
        from gguf.quants import IQ4_NL

        return np.array(IQ4_NL.kvalues, dtype=np.float64)
    raise KeyError(f"write down the values of {name} here, from their source")


def nearest_codes(values: Array, x: Array) -> Array:
    """The code of the nearest value; of two as near the even one; of two alike the lower one."""
    x = np.clip(x.astype(np.float64), np.nanmin(values), np.nanmax(values))
    far = np.abs(x[..., None] - values)
    far = np.where(np.isnan(far), np.inf, far)
    nearest = far == far.min(-1, keepdims=True)
    order = np.argsort(np.arange(len(values)) % 2, kind="stable")  # even codes first
    return order[np.argmax(nearest[..., order], -1)]


def store(x: Array, dtype: torch.dtype) -> Array:
    """float32 numbers rounded to a stored dtype, ties to even, as float32."""
    x = x.astype(np.float32)
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if dtype == torch.bfloat16:
        pattern = x.view(np.uint32)
        rounded = pattern + 0x7FFF + ((pattern >> 16) & 1)
        return (rounded & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return x


def store_scale(grid: Grid, s: Array) -> Array:
    """As `store`, but upwards where fp16 is subnormal. Below the least number that is normal in
    float32: 1, or that number where zero is no level."""
    dtype = grid.scale
    assert isinstance(dtype, torch.dtype)
    info = torch.finfo(dtype)
    least = np.float32(2.0**-24 if dtype == torch.float16 else 2.0**-126)
    stored = store(s, dtype)
    stored = np.where(stored < least, np.float32(0), stored)
    up = (stored > 0) & (stored < s) & (s < info.tiny)
    stored = np.where(up, stored + least, stored)
    idle = np.float32(1) if 0 in level_values(grid.levels.name) else least
    return np.where(stored > 0, stored, idle)


def quantize(grid: Grid, w: Array) -> Result:
    """Plain rounding of float32 numbers `[out in]`."""
    values = level_values(grid.levels.name)
    least, most = np.float32(np.nanmin(values)), np.float32(np.nanmax(values))
    height = w.shape[0] if grid.blocks.rows == -1 else grid.blocks.rows
    width = w.shape[1] if grid.blocks.cols == -1 else grid.blocks.cols
    blocks = [
        [w[r : r + height, c : c + width] for c in range(0, w.shape[1], width)]
        for r in range(0, w.shape[0], height)
    ]
    lo = np.array([[min(b.min(), np.float32(0)) for b in row] for row in blocks])
    hi = np.array([[max(b.max(), np.float32(0)) for b in row] for row in blocks])
    if grid.zero:
        raw = (hi - lo) / (most - least)
    else:
        raw = np.maximum(hi / most, lo / least) if least < 0 else hi / most
    scale, s = _scales(grid, raw)
    zero = None
    if grid.zero == "code":
        zero = np.clip(np.rint(-lo / s), 0, len(values) - 1).astype(np.uint8)
    if grid.zero == "shift":
        assert grid.zero_dtype is not None
        zero = store(lo, grid.zero_dtype)
    codes, numbers = np.zeros(w.shape, np.uint8), np.zeros(w.shape, np.float32)
    for i, row in enumerate(blocks):
        for j, block in enumerate(row):
            place = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            z = None if zero is None else zero[i, j]
            q, v = _block(grid.zero, values, block, s[i, j], z)
            codes[place], numbers[place] = q, v
    return Result(codes, scale, zero, numbers)


def _scales(grid: Grid, raw: Array) -> tuple[Array | Result | None, Array]:
    """The stored scales and the numbers they stand for."""
    if grid.scale is None:
        return None, np.ones_like(raw)
    if not isinstance(grid.scale, Grid):
        stored = store_scale(grid, raw)
        return stored, stored
    inner = quantize(grid.scale, raw)
    values = level_values(grid.scale.levels.name)
    smallest = nearest_codes(values, np.array(min(v for v in values if v > 0)))
    codes = np.where(values[inner.codes] > 0, inner.codes, smallest).astype(np.uint8)
    numbers = decode(grid.scale, inner._replace(codes=codes))
    return inner._replace(codes=codes, numbers=numbers), numbers


def _block(
    zero: str | None, values: Array, w: Array, s: Array, z: Array | None
) -> tuple[Array, Array]:
    """Codes and decoded numbers of one block; every step is one float32 operation."""
    with np.errstate(over="ignore"):
        if z is None:
            q = nearest_codes(values, w / s)
            return q, values[q].astype(np.float32) * s
        if zero == "shift":
            q = nearest_codes(values, (w - z) / s)
            return q, values[q].astype(np.float32) * s + z
        q = np.clip(np.rint(w / s) + np.float32(z), 0, len(values) - 1)
        return q.astype(np.uint8), (q - np.float32(z)) * s


def decode(grid: Grid, q: Result) -> Array:
    """Float32 numbers of codes, in the stated order of operations, one number at a time."""
    values = level_values(grid.levels.name).astype(np.float32)
    s = q.scale
    if isinstance(s, Result):
        assert isinstance(grid.scale, Grid)
        s = decode(grid.scale, s)
    numbers = np.zeros(q.codes.shape, np.float32)
    counts = (1, 1) if s is None else s.shape
    height, width = q.codes.shape[0] // counts[0], q.codes.shape[1] // counts[1]
    for i in range(q.codes.shape[0]):
        for j in range(q.codes.shape[1]):
            at = i // height, j // width
            v = values[q.codes[i, j]]
            if grid.zero == "code":
                assert q.zero is not None
                v = v - values[q.zero[at]]
            v = v if s is None else v * s[at]
            if grid.zero == "shift":
                assert q.zero is not None
                v = v + q.zero[at]
            numbers[i, j] = v
    return numbers


def as_result(grid: Grid, parts: Parts) -> Result:
    """The library's parts as numpy arrays."""
    scale = parts.scale
    if isinstance(scale, Parts):
        assert isinstance(grid.scale, Grid)
        stored: Array | Result | None = as_result(grid.scale, scale)
    else:
        stored = None if scale is None else scale.float().numpy()
    zero = parts.zero
    if zero is not None:
        zero = zero.numpy() if zero.dtype == torch.uint8 else zero.float().numpy()
    return Result(parts.codes.numpy(), stored, zero, np.zeros(0, np.float32))


def same(a: Result, b: Result) -> bool:
    """Whether codes, scales and zeros are equal."""
    if isinstance(a.scale, Result) and isinstance(b.scale, Result):
        scales = same(a.scale, b.scale)
    else:
        scales = _equal(a.scale, b.scale)
    return scales and _equal(a.codes, b.codes) and _equal(a.zero, b.zero)


def _equal(a: Array | None, b: Array | None) -> bool:
    return a is b if a is None or b is None else bool(np.array_equal(a, b))
