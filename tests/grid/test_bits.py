"""Packing against a loop over single bits, and against foreign layouts as they are described."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ongrid.errors import PackingError
from ongrid.grid import pack, pack_words, packed_bytes, unpack, unpack_words

WIDTHS = range(1, 9)
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
each_width = pytest.mark.parametrize("bits", WIDTHS)
patient = settings(deadline=None)  # a busy machine is not an error


def random_codes(rows: int, n: int, bits: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + n * 10 + bits)
    return torch.randint(0, 2**bits, (rows, n), generator=generator).to(torch.uint8)


def packed_by_loop(codes: Sequence[int], bits: int) -> list[int]:
    """Code k has bits k*b to k*b + b - 1 of one stream; bit 0 is the lowest of the first byte."""
    stream = [code >> i & 1 for code in codes for i in range(bits)]
    stream += [0] * (-len(stream) % 8)
    return [sum(stream[at + i] << i for i in range(8)) for at in range(0, len(stream), 8)]


def word_codes(bits: int) -> int:
    return {1: 32, 2: 16, 3: 32, 4: 8, 5: 32, 6: 16, 7: 32, 8: 4}[bits]


@st.composite
def widths_and_codes(draw: st.DrawFn) -> tuple[int, list[int]]:
    bits = draw(st.integers(1, 8))
    return bits, draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=70))


@patient
@given(widths_and_codes())
def test_any_codes_pack_as_the_loop_does_and_come_back(case: tuple[int, list[int]]):
    bits, codes = case
    t = torch.tensor(codes, dtype=torch.uint8)
    packed = pack(t, bits)
    assert packed.tolist() == packed_by_loop(codes, bits)
    assert len(packed) == packed_bytes(len(codes), bits)
    assert torch.equal(unpack(packed, bits, len(codes)), t)


@each_width
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 31, 32, 33, 100])
def test_every_width_and_length(bits: int, n: int):
    codes = random_codes(3, n, bits)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert packed.tolist() == [packed_by_loop(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack(packed, bits, n), codes)


@each_width
def test_all_leading_axes_are_rows(bits: int):
    codes = random_codes(6, 13, bits).reshape(2, 3, 13)
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, packed_bytes(13, bits))
    assert torch.equal(packed.reshape(6, -1), pack(codes.reshape(6, 13), bits))
    assert torch.equal(unpack(packed, bits, 13), codes)


@each_width
def test_strided_codes_and_bytes(bits: int):
    codes = random_codes(16, 8, bits).T
    assert not codes.is_contiguous()
    assert torch.equal(pack(codes, bits), pack(codes.contiguous(), bits))
    packed = pack(random_codes(8, 16, bits), bits)
    strided = packed.T.contiguous().T
    assert torch.equal(unpack(strided, bits, 16), unpack(packed, bits, 16))


@each_width
def test_the_results_share_no_memory_with_the_arguments(bits: int):
    codes = random_codes(1, 8, bits)
    packed = pack(codes, bits)
    back = unpack(packed, bits, 8)
    packed.zero_()
    assert torch.equal(back, random_codes(1, 8, bits))
    assert torch.equal(codes, random_codes(1, 8, bits))


@each_width
def test_unused_high_bits_are_zero(bits: int):
    packed = pack(torch.full((5,), 2**bits - 1, dtype=torch.uint8), bits)
    assert int(packed[-1]) == 2 ** (5 * bits - 8 * (len(packed) - 1)) - 1


@pytest.mark.parametrize("bits", range(1, 8))
def test_a_code_that_does_not_fit_is_refused(bits: int):
    codes = torch.zeros(2, 9, dtype=torch.uint8)
    codes[1, 8] = 2**bits
    with pytest.raises(PackingError, match=f"code {2**bits} does not fit into {bits} bits"):
        pack(codes, bits)
    with pytest.raises(PackingError, match="does not fit"):
        pack_words(codes.new_full((32, 32), 2**bits), bits)


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_other_widths_are_refused(bits: int):
    with pytest.raises(PackingError, match=f"1 to 8 bits, not {bits}"):
        pack(torch.zeros(1, 8, dtype=torch.uint8), bits)


@each_width
@pytest.mark.parametrize("surplus", [-1, 1])
def test_bytes_of_another_shape_are_refused(bits: int, surplus: int):
    n = 24
    packed = torch.zeros(2, packed_bytes(n, bits) + surplus, dtype=torch.uint8)
    expected = f"24 codes of {bits} bits fill {3 * bits} bytes, found {3 * bits + surplus}"
    with pytest.raises(PackingError, match=expected):
        unpack(packed, bits, n)


# Words


@each_width
@pytest.mark.parametrize("axis", [0, 1])
def test_words_along_both_axes(bits: int, axis: int):
    n = 2 * word_codes(bits)
    codes = random_codes(3, n, bits)
    words = pack_words(codes if axis == 1 else codes.T.contiguous(), bits, axis=axis)
    assert words.dtype == torch.int32 and words.is_contiguous()
    rows = words if axis == 1 else words.T
    for row, found in zip(codes.tolist(), rows.tolist(), strict=True):
        number = int.from_bytes(bytes(packed_by_loop(row, bits)), "little")
        assert [w & 0xFFFFFFFF for w in found] == [
            number >> 32 * i & 0xFFFFFFFF for i in range(n * bits // 32)
        ]
    back = unpack_words(words, bits, axis=axis)
    assert torch.equal(back if axis == 1 else back.T, codes)


@each_width
def test_words_of_all_ones_are_negative_and_come_back(bits: int):
    codes = torch.full((1, word_codes(bits)), 2**bits - 1, dtype=torch.uint8)
    words = pack_words(codes, bits)
    assert words.tolist() == [[-1] * words.shape[1]]
    assert torch.equal(unpack_words(words, bits), codes)


def test_three_bits_as_gptq_reads_them():
    """32 codes in 3 words: 10, a split one, 10, a split one, 10."""
    c = random.Random(0).choices(range(8), k=32)
    first = sum(c[i] << 3 * i for i in range(10)) | (c[10] & 0b011) << 30
    second = c[10] >> 2 | sum(c[11 + i] << 3 * i + 1 for i in range(10)) | (c[21] & 0b001) << 31
    third = c[21] >> 1 | sum(c[22 + i] << 3 * i + 2 for i in range(10))
    words = pack_words(torch.tensor([c], dtype=torch.uint8), 3)
    assert [w & 0xFFFFFFFF for w in words[0].tolist()] == [first, second, third]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_even_widths_as_gptq_reads_them(bits: int):
    """Along the input, code j of a word at bit j*b, words of a column below one another."""
    per_word = 32 // bits
    codes = random_codes(2 * per_word, 5, bits)  # [in out]
    expected = [
        [
            sum(int(codes[w * per_word + j, out]) << bits * j for j in range(per_word))
            for out in range(5)
        ]
        for w in range(2)
    ]
    found = pack_words(codes, bits, axis=0)
    assert [[w & 0xFFFFFFFF for w in row] for row in found.tolist()] == expected


def test_four_bits_as_awq_reads_them():
    """Along the output, place j of a word holds code AWQ[j] of its eight."""
    codes = random_codes(3, 16, 4)  # [in out]
    expected = [
        [sum(row[8 * w + code] << 4 * place for place, code in enumerate(AWQ)) for w in range(2)]
        for row in codes.tolist()
    ]
    found = pack_words(codes, 4, interleave=AWQ)
    assert [[w & 0xFFFFFFFF for w in row] for row in found.tolist()] == expected
    assert torch.equal(unpack_words(found, 4, interleave=AWQ), codes)


@pytest.mark.parametrize("axis", [0, 1])
@given(order=st.permutations(range(8)))
@patient
def test_any_interleave_comes_back(axis: int, order: list[int]):
    codes = random_codes(16, 16, 4)
    words = pack_words(codes, 4, axis=axis, interleave=tuple(order))
    assert torch.equal(unpack_words(words, 4, axis=axis, interleave=tuple(order)), codes)


@each_width
@pytest.mark.parametrize("axis", [0, 1])
def test_codes_that_do_not_fill_words_are_refused(bits: int, axis: int):
    n = word_codes(bits)
    codes = torch.zeros(n + 1, n + 1, dtype=torch.uint8)
    with pytest.raises(PackingError) as raised:
        pack_words(codes, bits, axis=axis)
    assert raised.value.what == f"{n + 1} codes of {bits} bits do not fill whole 32-bit words"
    assert raised.value.remedy == f"The packed axis must be a multiple of {n}."


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_single_word_along_either_axis(bits: int):
    codes = (torch.arange(32 // bits * 3).reshape(3, -1) % 2**bits).to(torch.uint8)
    for axis, laid in ((1, codes), (0, codes.T.contiguous())):
        words = pack_words(laid, bits, axis=axis)
        assert 1 in words.shape
        assert torch.equal(unpack_words(words, bits, axis=axis), laid)
        assert torch.equal(unpack_words(words.T, bits, axis=1 - axis), laid.T)
