"""The referee: a second decoder of artifacts, which exists to disagree with the first.

It shares nothing with `ongrid.grid`, `ongrid.nn` and `ongrid.store`: numpy and the standard library
read the safetensors bytes, parse the grid's string, unpack the codes and round to the compute
dtype by other means than theirs. That two decoders, written apart, agree in every bit is the proof:
nothing here may ever be replaced by a call to what it judges.

With q a code, v(q) its level, s the scale and z or b the zero of its block, a number is

    sym      v(q) * s
    code     (v(q) - v(z)) * s
    shift    v(q) * s + b

in float32, in exactly this order, rounded once to the compute dtype, ties to even.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ongrid.errors import OngridError, StoreError, VerifyError

_CHUNK = 1 << 18  # numbers decoded at a time: float32 and bit planes of this many stay in the cache
_DAMAGED = "The file is damaged: fetch it or write it again."

# By safetensors' tag of a dtype: the numpy dtype of the bytes, and the word of a grid's string.
# numpy has no bfloat16: its bytes are read as the integers that they also are.
_STORED = {
    "U8": (np.dtype("<u1"), "code"),
    "I32": (np.dtype("<i4"), "order"),
    "F16": (np.dtype("<f2"), "fp16"),
    "BF16": (np.dtype("<u2"), "bf16"),
    "F32": (np.dtype("<f4"), "fp32"),
}
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_IQ4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, eq=False)
class Decoded:
    """A decoded matrix `[out in]`: `bits` are the bit patterns of its numbers, uint16 or uint32.

    `dtype` is the compute dtype, `hash` what `ongrid.store.shards.tensor_hash` gives of the matrix.
    """

    shape: tuple[int, int]
    dtype: str
    bits: np.ndarray
    hash: str


class Stored(NamedTuple):
    """A tensor as it lies in a file: safetensors' tag of its dtype, its shape, its bytes, uint8."""

    tag: str
    shape: tuple[int, ...]
    data: np.ndarray


class Referee:
    """An artifact's folder, decoded matrix by matrix; holds one matrix at a time.

    `matrices`: the manifest's, by the path of the linear. `StoreError` when `ongrid.json` or the
    index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._entries = _table(_json(self.folder / "ongrid.json"), "matrices", "ongrid.json")
        index = "model.safetensors.index.json"
        self._homes: dict[str, set[str]] = {}  # of each matrix, the files that hold parts of it
        for name, file in _table(_json(self.folder / index), "weight_map", index).items():
            path, dot, _ = name.partition(".weight_quantizer.")
            if dot:
                self._homes.setdefault(path, set()).add(str(file))
        self._headers: dict[str, dict[str, Any]] = {}

    @property
    def matrices(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def decode(self, path: str) -> Decoded:
        """The matrix that the files hold for a linear.

        `StoreError` when files, tensors or manifest do not fit each other, `VerifyError` when the
        bytes stand for no numbers; both name the matrix.
        """
        try:
            grid, shape, dtype = _entry(self._entries[path])
            file, head = self._home(path), f"{path}.weight_quantizer."
            found = {
                name.removeprefix(head): self._read(file, name, info)
                for name, info in self._header(file).items()
                if name.startswith(head)
            }
            return decode(grid, shape, dtype, found)
        except OngridError as error:
            raise error.at(path) from None

    def recorded(self, path: str) -> str | None:
        """The hash of the matrix that the layer multiplied with, recorded when it was written."""
        header = self._header(self._home(path))
        try:
            recorded = json.loads(header["__metadata__"]["ongrid"])["used"][path]
        except (KeyError, TypeError, ValueError):
            return None
        return recorded if isinstance(recorded, str) else None

    def _home(self, path: str) -> str:
        files = sorted(self._homes.get(path, ()))
        if len(files) != 1:
            raise _unfit(f"the index finds it in {', '.join(files) or 'no file'}, not in one file")
        return files[0]

    def _header(self, file: str) -> dict[str, Any]:
        if file not in self._headers:
            self._headers[file] = _header(self.folder / file)
        return self._headers[file]

    def _read(self, file: str, name: str, info: Any) -> Stored:
        match info:
            case {"dtype": str(tag), "shape": [*shape], "data_offsets": [int(start), int(end)]} if (
                tag in _STORED
                and all(isinstance(n, int) and n >= 0 for n in (*shape, start, end))
                and math.prod(shape) * _STORED[tag][0].itemsize == end - start
            ):
                pass
            case _:
                raise _unfit(f"{file}: its header describes {name} as {info}")
        with (self.folder / file).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            stream.seek(8 + length + start)
            data = np.fromfile(stream, np.uint8, end - start)
        if data.size != end - start:
            raise _unfit(f"{file}: ends inside {name}")
        return Stored(tag, tuple(shape), data)


def decode(grid: str, shape: tuple[int, int], dtype: str, tensors: Mapping[str, Stored]) -> Decoded:
    """The matrix `[out in]` that stored tensors mean on a grid, in the compute dtype.

    `StoreError` unless the tensors are exactly those of the grid; `VerifyError` where they stand
    for no numbers.
    """
    left = dict(tensors)
    rounding = _ROUNDINGS[dtype]
    rounded: list[np.ndarray] = []
    for numbers in _numbers(_parse(grid), shape, left, left.pop("order", None)):
        nans = int(np.isnan(numbers).sum())
        if nans:
            raise VerifyError(f"{nans} of the numbers that its codes stand for are NaN")
        rounded.append(rounding(numbers))
    if left:
        raise _unfit(f"{grid} has no tensor {', '.join(sorted(left))}")
    bits = np.concatenate(rounded)
    digest = hashlib.sha256(json.dumps([dtype, list(shape)]).encode() + b"\n")
    digest.update(bits.data)
    return Decoded(shape, dtype, bits, digest.hexdigest())


# ---- the arithmetic -----------------------------------------------------------------------------


def _numbers(
    grid: _Grid, shape: tuple[int, int], tensors: dict[str, Stored], order: Stored | None = None
) -> Iterator[np.ndarray]:
    """Float32 rows of a matrix, some at a time; takes what it uses out of `tensors`."""
    rows, cols = shape
    high, wide = (n if size == -1 else size for n, size in zip(shape, grid.block, strict=True))
    if rows % high or cols % wide:
        raise _unfit(f"blocks of {high} x {wide} on a matrix {list(shape)}")
    blocks = rows // high, cols // wide
    packed = _take(tensors, "codes", "code", (rows, -(-cols * grid.bits // 8)))
    s = _scales(grid, blocks, tensors)
    z = None if grid.zero == "sym" else _take(tensors, "zero", grid.zero_dtype, blocks)
    if z is not None and grid.zero == "code":
        if int(z.max()) >= len(grid.levels):
            raise _unfit(f"zero {int(z.max())} is no code of {grid.bits} bits")
        z = grid.levels[z]
    right = np.arange(cols) // wide if order is None else _groups(order, cols, blocks[1])
    step = max(1, _CHUNK // cols)
    for start in range(0, rows, step):
        down = np.arange(start, min(start + step, rows)) // high
        x = np.take(grid.levels, _codes(packed[start : start + step], grid.bits, cols))
        with np.errstate(all="ignore"):  # infinities are numbers here, and NaN is found later
            if z is not None and grid.zero == "code":
                x -= z[down][:, right]
            if s is not None:
                x *= s[down][:, right]
            if z is not None and grid.zero == "shift":
                x += z[down][:, right]
        yield x


def _groups(order: Stored, cols: int, groups: int) -> np.ndarray:
    """The group of each column."""
    found = _take({"order": order}, "order", "order", (cols,))
    if not 0 <= int(found.min()) <= int(found.max()) < groups:
        raise _unfit(f"order names groups outside 0 to {groups - 1}")
    return found


def _scales(grid: _Grid, blocks: tuple[int, int], tensors: dict[str, Stored]) -> np.ndarray | None:
    """Float32 scales `[R C]`, None where every scale is one."""
    if not isinstance(grid.scale, _Grid):
        return None if grid.scale == "one" else _take(tensors, "scale", grid.scale, blocks)
    names = [name for name in tensors if name.startswith("scale.")]
    inner = {name.removeprefix("scale."): tensors.pop(name) for name in names}
    numbers = np.concatenate(list(_numbers(grid.scale, blocks, inner)))
    if inner:
        raise _unfit(f"scales have no tensor {', '.join(sorted(inner))}")
    return numbers


def _codes(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes `[rows count]` from the bit stream of each row, lowest bit first."""
    planes = np.unpackbits(packed, axis=1, count=count * bits, bitorder="little")
    return planes.reshape(len(packed), count, bits) @ (1 << np.arange(bits)).astype(np.uint8)


def _take(tensors: dict[str, Stored], name: str, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor as numbers: integers as they are, floats as float32."""
    if name not in tensors:
        raise _unfit(f"no tensor {name!r}")
    tag, found, data = tensors.pop(name)
    dtype, meant = _STORED[tag]
    if (found, meant) != (shape, kind):
        raise _unfit(f"{name} is {meant} {list(found)}, not {kind} {list(shape)}")
    numbers = data.view(dtype).reshape(shape)
    if kind == "bf16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32) if kind == "fp16" else numbers


def _round_bfloat16(x: np.ndarray) -> np.ndarray:
    """The upper half of a float32, one up if the lower is past its middle, or on it and odd."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _round_float16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint16)


def _round_float32(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


# By compute dtype: the one rounding, from float32 to bit patterns.
_ROUNDINGS = {
    "bfloat16": _round_bfloat16,
    "float16": _round_float16,
    "float32": _round_float32,
}


# ---- the meaning of a grid's string -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Grid:
    levels: np.ndarray  # float32, by code
    bits: int
    block: tuple[int, int]
    zero: str
    scale: str | _Grid
    zero_dtype: str


def _parse(text: str) -> _Grid:
    """`levels.blocks.zero.scale[.shift dtype]`; a scale in brackets is a grid of its own."""
    levels, block, zero, rest = (*text.split(".", 3), "", "", "")[:4]
    nested, bracket, shift = rest.rpartition("]")
    scale, _, shift = (nested + bracket, "", shift[1:]) if bracket else rest.partition(".")
    sizes = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", block)
    whole = {"channel": (1, -1), "tensor": (-1, -1)}
    floats = ("fp16", "bf16", "fp32")
    nests = scale.startswith("[")
    understood = (
        (sizes or block in whole)
        and zero in ("sym", "code", "shift")
        and (nests or scale in floats or (scale == "one" and zero == "sym"))
        and (zero != "shift" or (shift or scale) in floats)
        and (zero == "shift" or not shift)
    )
    if not understood:
        raise VerifyError(f"the referee does not know the grid {text!r}")
    values = _levels(levels)
    return _Grid(
        values,
        len(values).bit_length() - 1,
        (int(sizes[1] or 1), int(sizes[2])) if sizes else whole[block],
        zero,
        _parse(scale[1:-1]) if nests else scale,
        "code" if zero == "code" else shift or scale,
    )


def _levels(name: str) -> np.ndarray:
    """The number of every code, float32; NaN for a code that stands for none."""
    integer = re.fullmatch(r"(u?)int([2-8])", name)
    if integer:
        count = 2 ** int(integer[2])
        return np.arange(count, dtype=np.float32) - np.float32(0 if integer[1] else count // 2)
    if name == "nf4":
        return np.array(_NF4, np.float32)
    if name == "iq4nl":
        return np.array(_IQ4NL, np.float32)
    if name == "e8m0":
        # The exponent field of a float32, its lowest code a subnormal and its highest NaN.
        codes = np.arange(256, dtype=np.uint32) << 23
        codes[0], codes[255] = 0x00400000, 0x7FC00000
        return codes.view(np.float32)
    if name in ("e4m3", "e5m2", "e2m1", "e3m2", "e2m3"):
        return _small_floats(int(name[1]), int(name[3]))
    raise VerifyError(f"the referee does not know the levels {name!r}")


def _small_floats(exponent: int, mantissa: int) -> np.ndarray:
    """Every bit pattern of a small float, its fields moved to where a float32 has them."""
    codes = np.arange(2 ** (1 + exponent + mantissa), dtype=np.uint32)
    sign = codes >> (exponent + mantissa)
    rest = codes & (2 ** (exponent + mantissa) - 1)
    # Read with float32's bias, a pattern is too small by the same power of two for normal numbers
    # and subnormals alike, so that one exact product corrects both.
    small = (rest << (23 - mantissa)).view(np.float32)
    values = small * np.float32(2.0 ** (127 - (2 ** (exponent - 1) - 1)))
    if (exponent, mantissa) == (4, 3):
        values[rest == 0x7F] = np.nan
    if (exponent, mantissa) == (5, 2):
        values[rest >= 0x7C] = np.nan  # infinity is no level: nothing is ever rounded to it
    return np.where(sign == 1, -values, values)


# ---- files --------------------------------------------------------------------------------------


def _header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: 8 bytes of length, then the header, then tensors."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > path.stat().st_size:
                raise _unfit(f"{path.name}: its header is longer than the file")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise _unfit(f"{path.name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _unfit(f"{path.name}: its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _unfit(f"{path.name}: its header is not a JSON object")
    return header


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except ValueError as error:
        raise StoreError(f"is not JSON: {error}", where=str(path)) from None


def _table(plain: Any, key: str, file: str) -> dict[str, Any]:
    table = plain.get(key) if isinstance(plain, dict) else None
    if not isinstance(table, dict):
        raise StoreError(f"has no table {key!r}", where=file, remedy=_DAMAGED)
    return table


def _entry(entry: Any) -> tuple[str, tuple[int, int], str]:
    match entry:
        case {"grid": str(grid), "shape": [int(rows), int(cols)], "dtype": str(dtype)} if (
            dtype in _ROUNDINGS and min(rows, cols) > 0
        ):
            return grid, (rows, cols), dtype
    raise _unfit(f"the manifest's entry is not that of a matrix: {entry}")


def _unfit(what: str) -> StoreError:
    return StoreError(what, remedy=_DAMAGED)
