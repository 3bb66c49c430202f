"""GPTQ's bytes, packed by loops and by hand: the very codes, scales and zeros come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.foreign import Made, as_gptq, assert_is, gptq_section, ints, linear, make
from ongrid.errors import ConfigError, GridError, OngridError, Problems, StoreError
from ongrid.export.gptq import GptqReader
from ongrid.export.reader import open_reader
from ongrid.grid import Grid


def reader(**changes: Any) -> GptqReader:
    found = open_reader(gptq_section(**changes))
    assert isinstance(found, GptqReader)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_scales_and_zeros_are_those_of_the_file(
    bits: int, version: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    made = make((32, 64), bits, 32, dtype=dtype)
    found = linear(tmp_path, as_gptq(made, version), made.shape)
    form = "gptq" if version == 1 else "gptq_v2"
    gptq = reader(bits=bits, checkpoint_format=form)
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    assert gptq.check(found) == Grid.parse(f"int{bits}.32.code.{name}")
    assert_is(gptq.read(found), made)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, -1])
def test_symmetric_folders_are_symmetric_grids(
    bits: int, version: int, group: int, tmp_path: Path
) -> None:
    made = make((32, 64), bits, group, sym=True)
    found = linear(tmp_path, as_gptq(made, version), made.shape)
    form = "gptq" if version == 1 else "gptq_v2"
    gptq = reader(bits=bits, sym=True, group_size=group, checkpoint_format=form)
    blocks = "channel" if group == -1 else "32"
    assert gptq.check(found) == Grid.parse(f"int{bits}.{blocks}.sym.fp16")
    assert_is(gptq.read(found), made)


def test_words_written_by_hand(tmp_path: Path) -> None:
    """Eight 4-bit codes to a word, the first in the lowest bits, the last in the sign."""
    made = Made(
        4,
        codes=[[1, 2, 3, 4, 5, 6, 7, 8]] + [[0, 0, 0, 0, 0, 0, 0, 15]] * 7,
        zeros=[[0], [5], [7], [0], [15], [1], [2], [8]],
        scales=torch.full((8, 1), 0.5, dtype=torch.float16),
        groups=[0] * 8,
    )
    tensors = as_gptq(made, 1)
    last = 0xF0000000 - 2**32
    assert tensors["qweight"].tolist() == [[0x87654321 - 2**32, *[last] * 7]]
    # Zeros less one, each wrapped by itself: 15, 4, 6, 15, 14, 0, 1, 7.
    assert tensors["qzeros"].tolist() == [[0x710EF64F]]
    found = linear(tmp_path, tensors, made.shape)
    gptq = reader(group_size=8, checkpoint_format="gptq")
    gptq.check(found)
    assert_is(gptq.read(found), made)


def test_zero_0_of_version_1_does_not_carry(tmp_path: Path) -> None:
    """Every zero is stored as 2^b - 1: a plain sum of the words would be 0x...0 and a carry."""
    for bits in (2, 3, 4, 8):
        made = make((32, 32), bits, 32)
        made.zeros = [[0]] * 31 + [[3]]
        found = linear(tmp_path / str(bits), as_gptq(made, 1), made.shape)
        assert found.read("qzeros")[0, 0] == -1
        gptq = reader(bits=bits, checkpoint_format="gptq")
        gptq.check(found)
        assert_is(gptq.read(found), made)


def test_order_is_kept_and_a_trivial_one_is_none(tmp_path: Path) -> None:
    for order in (True, False):
        made = make((32, 64), order=order)
        found = linear(tmp_path / str(order), as_gptq(made, 2), made.shape)
        gptq = reader(desc_act=True)
        gptq.check(found)
        assert (gptq.read(found).order is not None) == order
        assert_is(gptq.read(found), made)


def test_g_idx_may_be_left_out_where_it_says_nothing(tmp_path: Path) -> None:
    made = make((32, 64))
    tensors = as_gptq(made, 2)
    del tensors["g_idx"]
    found = linear(tmp_path, tensors, made.shape)
    reader().check(found)
    assert_is(reader().read(found), made)
    with pytest.raises(StoreError, match="x: has no g_idx"):
        reader(desc_act=True).check(found)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    version=st.sampled_from([1, 2]),
    order=st.booleans(),
    group=st.sampled_from([-1, 8, 16, 32]),
    wide=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_unpacking_inverts_the_loops(
    bits: int, version: int, order: bool, group: int, wide: int, seed: int, tmp_path: Path
) -> None:
    made = make((32, 32 * wide), bits, group, order=order, seed=seed)
    found = linear(tmp_path, as_gptq(made, version), made.shape)
    form = "gptq" if version == 1 else "gptq_v2"
    gptq = reader(bits=bits, group_size=group, desc_act=order, checkpoint_format=form)
    gptq.check(found)
    assert_is(gptq.read(found), made)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"bits": 5}, "5 bits"),
        ({"bits": 4.0}, "takes int"),
        ({"bits": True}, "takes int"),
        ({"sym": 1}, "takes bool"),
        ({"group_size": 0}, "group_size 0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"checkpoint_format": ["gptq"]}, "checkpoint_format"),
        ({"format": "gptq"}, "'gptq' and 'gptq_v2'"),
        ({"pack_dtype": "int64"}, "pack_dtype 'int64'"),
        ({"dynamic": {"+:.*up": {"bits": 8}}}, "sets dynamic"),
        ({"adapter": {"name": "lora"}}, "sets adapter"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"zeropoint_dtype": "fp16"}, "sets zeropoint_dtype .* not known"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        reader(**changes)


def test_what_is_wrong_with_a_config_is_said_at_once() -> None:
    section = gptq_section(checkpoint_format="marlin", adapter="x", unheard=1)
    del section["sym"], section["bits"]
    with pytest.raises(Problems) as caught:
        open_reader(section)
    assert len(caught.value.problems) == 4
    assert "has no bits, sym" in str(caught.value)


def test_what_is_neutral_may_be_null_or_set() -> None:
    reader(dynamic=None, adapter=None, format="gptq_v2", unheard=None, pack_dtype=None)
    reader(static_groups=True, model_seqlen=2048, modules_in_block_to_quantize=[["a"]])
    bare = {k: gptq_section()[k] for k in ("quant_method", "bits", "group_size", "desc_act", "sym")}
    assert open_reader(bare).checkpoint_format == "gptq"


def bent(tensors: dict[str, torch.Tensor], change: str) -> dict[str, torch.Tensor]:
    part, _, how = change.partition(" ")
    tensor = tensors[part]
    bends = {
        "missing": lambda: None,
        "turned": lambda: tensor.T,
        "short": lambda: tensor[:-1],
        "int64": tensor.long,
        "float64": tensor.double,
        "negative": lambda: -tensor,
        "zero": lambda: tensor * 0,
        "nan": lambda: tensor * float("nan"),
        "inf": lambda: tensor * float("inf"),
        "huge": lambda: torch.full_like(tensor, 60000),
        "beyond": lambda: tensor + 1,
        "below": lambda: tensor - 1,
        "one-sided": lambda: tensor * 0,
        "reversed": lambda: tensor.flip(0),
    }
    changed = bends[how]()
    return {k: t for k, t in {**tensors, part: changed}.items() if t is not None}


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ("qweight missing", StoreError, "has no qweight"),
        ("qzeros missing", StoreError, "has no qzeros"),
        ("scales missing", StoreError, "has no scales"),
        ("qweight turned", StoreError, r"qweight is int32 \[32, 8\], expected int32 \[8, 32\]"),
        ("qzeros short", StoreError, r"qzeros is int32 \[1, 4\]"),
        ("qweight int64", StoreError, "qweight is int64"),
        ("scales float64", StoreError, "scales is float64"),
        ("scales short", StoreError, "scales is float16"),
        ("g_idx short", StoreError, "g_idx is int32"),
        ("scales negative", GridError, "scales that are negative"),
        ("scales zero", GridError, "scales that are negative, zero"),
        ("scales nan", GridError, "NaN"),
        ("scales inf", GridError, "infinite"),
        ("scales huge", GridError, "not finite in float16"),
        ("g_idx beyond", StoreError, "not in 2 groups of 32 each, from 0 to 1"),
        ("g_idx below", StoreError, "not in 2 groups of 32 each"),
        ("g_idx one-sided", StoreError, "not in 2 groups of 32 each"),
    ],
)
def test_tensors_that_are_refused(
    change: str, error: type[OngridError], word: str, tmp_path: Path
) -> None:
    made = make((32, 64))
    found = linear(tmp_path, bent(as_gptq(made, 2), change), made.shape)
    with pytest.raises(error, match=word) as caught:
        reader(desc_act=True).check(found)
    assert caught.value.where == "x"
    assert caught.value.remedy


def test_a_reordering_g_idx_without_desc_act_is_refused(tmp_path: Path) -> None:
    made = make((32, 64), order=True)
    with pytest.raises(StoreError, match="desc_act is false"):
        reader().check(linear(tmp_path, as_gptq(made, 2), made.shape))


def test_a_symmetric_folder_with_other_zeros_is_refused(tmp_path: Path) -> None:
    made = make((32, 64), sym=True)
    found = linear(tmp_path, as_gptq(made, 2), made.shape)  # packed by 2, read by 1: they are 9
    with pytest.raises(StoreError, match="zeros other than 8") as caught:
        reader(sym=True, checkpoint_format="gptq").check(found)
    assert "checkpoint_format is wrong" in caught.value.remedy


def test_groups_and_words_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    made = make((32, 64))
    found = linear(tmp_path, as_gptq(made, 2), made.shape)
    with pytest.raises(GridError, match="64 columns do not divide into blocks of 48"):
        reader(group_size=48).check(found)
    odd = linear(tmp_path / "odd", as_gptq(make((4, 64)), 2), (4, 64))
    with pytest.raises(GridError, match="4 outputs of 4 bits do not fill 32-bit words"):
        reader().check(odd)


def test_parts_without_a_meaning_are_refused(tmp_path: Path) -> None:
    made = make((32, 64))
    tensors = {**as_gptq(made, 2), "perm": ints(list(range(64)))}
    with pytest.raises(StoreError, match="has a perm"):
        reader().check(linear(tmp_path, tensors, made.shape))
