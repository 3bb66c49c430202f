"""Packing: codes of 1 to 8 bits as a dense little-endian bit stream, and back.

Code k of a row occupies bits `[k*b, k*b + b)` of the row's stream, bit 0 being the lowest bit of
the first byte. Read as 32-bit words on a little-endian machine, this one stream is also the layout
of GPTQ's `qweight` at every width (3-bit codes straddle words: 10, a split one, 10, a split one,
10), of compressed-tensors' `weight_packed`, and of MLX.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor
from torch.nn.functional import pad

from ongrid.errors import PackingError


class _Unit(NamedTuple):
    """The least run of codes that fills whole bytes, and the integer that it is shifted in."""

    codes: int
    bytes: int
    word: torch.dtype


def _unit(bits: int) -> _Unit:
    if 8 % bits == 0:
        return _Unit(8 // bits, 1, torch.uint8)
    return _Unit(8, bits, torch.int64)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits occupy."""
    return -(-count * bits // 8)


def pack(codes: UInt8[Tensor, "*rows n"], bits: int) -> UInt8[Tensor, "*rows bytes"]:
    """Packs the last axis; the unused high bits of the last byte are zero.

    Raises `PackingError` if a code needs more than `bits` bits.
    """
    _check(codes, bits)
    *rows, n = codes.shape
    unit = _unit(bits)
    runs = pad(codes, (0, -n % unit.codes)).reshape(*rows, -1, unit.codes)
    words = runs[..., 0].to(unit.word)
    for i in range(1, unit.codes):
        words = words | (runs[..., i].to(unit.word) << (bits * i))
    stream = words.unsqueeze(-1).view(torch.uint8)[..., : unit.bytes].reshape(*rows, -1)
    return stream[..., : packed_bytes(n, bits)].contiguous()


def unpack(packed: UInt8[Tensor, "*rows bytes"], bits: int, n: int) -> UInt8[Tensor, "*rows n"]:
    """The inverse of `pack`; `n` is the number of codes in a row."""
    *rows, width = packed.shape
    if width != packed_bytes(n, bits):
        raise PackingError(
            f"{n} codes of {bits} bits fill {packed_bytes(n, bits)} bytes, found {width}",
            remedy="The file was packed for another shape or width.",
        )
    unit = _unit(bits)
    runs = pad(packed, (0, -width % unit.bytes)).reshape(*rows, -1, unit.bytes)
    words = runs if unit.bytes == 1 else pad(runs, (0, 8 - unit.bytes)).view(unit.word)
    mask = 2**bits - 1
    codes = [((words >> (bits * i)) & mask).to(torch.uint8) for i in range(unit.codes)]
    return torch.cat(codes, -1).reshape(*rows, -1)[..., :n].contiguous()


def pack_words(
    codes: UInt8[Tensor, "a b"], bits: int, *, axis: int = 1, interleave: tuple[int, ...] = ()
) -> Int32[Tensor, "c d"]:
    """Packs one axis into 32-bit words, the unit of most foreign formats.

    `interleave` permutes the codes within each word: place i holds code `interleave[i]` (AWQ:
    0, 2, 4, 6, 1, 3, 5, 7). The packed axis must fill whole words, else `PackingError`.
    """
    rows = codes.transpose(axis, 1)
    if rows.shape[1] * bits % 32:
        raise PackingError(
            f"{rows.shape[1]} codes of {bits} bits do not fill whole 32-bit words",
            remedy=f"The packed axis must be a multiple of {_word_codes(bits)}.",
        )
    if interleave:
        places = torch.tensor(interleave, device=codes.device)
        rows = rows.reshape(rows.shape[0], -1, len(interleave))[..., places].flatten(1)
    words = pack(rows.contiguous(), bits).view(torch.int32)
    return words.transpose(axis, 1).contiguous()


def unpack_words(
    words: Int32[Tensor, "a b"], bits: int, *, axis: int = 1, interleave: tuple[int, ...] = ()
) -> UInt8[Tensor, "c d"]:
    """The inverse of `pack_words`."""
    # Not `contiguous`: an axis of length 1 keeps any stride there, and then has no bytes to view.
    rows = words.transpose(axis, 1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    codes = unpack(rows, bits, rows.shape[1] * 8 // bits)
    if interleave:
        places = torch.tensor(interleave, device=words.device).argsort()
        codes = codes.reshape(codes.shape[0], -1, len(interleave))[..., places].flatten(1)
    return codes.transpose(axis, 1).contiguous()


def _word_codes(bits: int) -> int:
    """The least number of codes that fills whole 32-bit words."""
    return next(n for n in range(1, 33) if n * bits % 32 == 0)


def _check(codes: Tensor, bits: int) -> None:
    if not 1 <= bits <= 8:
        raise PackingError(f"codes have 1 to 8 bits, not {bits}")
    if bits < 8 and codes.numel() and int(codes.max()) >= 2**bits:
        raise PackingError(
            f"code {int(codes.max())} does not fit into {bits} bits",
            remedy="Encode with the grid that the codes are packed for.",
        )
