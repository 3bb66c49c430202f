"""compressed-tensors' bytes, packed by loops: the very codes, scales and zeros come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.foreign import as_compressed, assert_is, compressed_section, ints, linear, make
from ongrid.errors import ConfigError, GridError, OngridError, Problems, StoreError
from ongrid.export.compressed_tensors import CompressedTensorsReader
from ongrid.export.reader import open_reader
from ongrid.grid import Grid


def reader(
    weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **changes: Any
) -> CompressedTensorsReader:
    found = open_reader(compressed_section(weights, group, **changes))
    assert isinstance(found, CompressedTensorsReader)
    return found


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_scales_and_zeros_are_those_of_the_file(
    bits: int, group: int, sym: bool, tmp_path: Path
) -> None:
    dtype = (torch.float16, torch.bfloat16, torch.float32)[bits % 3]
    made = make((12, 64), bits, group, sym=sym, dtype=dtype)
    found = linear(tmp_path, as_compressed(made, sym=sym), made.shape)
    kind = {"strategy": "channel", "group_size": None} if group == -1 else {}
    ct = reader({"num_bits": bits, "symmetric": sym, **kind})
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    blocks = "channel" if group == -1 else "32"
    text = f"int{bits}.{blocks}.{'sym' if sym else 'code'}.{name}"
    assert ct.check(found) == Grid.parse(text)
    assert_is(ct.read(found), made)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    bits=st.integers(2, 8),
    order=st.booleans(),
    sym=st.booleans(),
    rows=st.integers(1, 40),
    cols=st.integers(1, 70),
    seed=st.integers(0, 2**16),
)
def test_unpacking_inverts_the_loops_whatever_does_not_fill_words(
    bits: int, order: bool, sym: bool, rows: int, cols: int, seed: int, tmp_path: Path
) -> None:
    made = make((rows, 2 * cols), bits, cols, order=order, sym=sym, seed=seed)
    found = linear(tmp_path, as_compressed(made, sym=sym, order=order), made.shape)
    actorder = "group" if order else "weight"
    kind = {"num_bits": bits, "symmetric": sym, "group_size": cols, "actorder": actorder}
    ct = reader(kind)
    ct.check(found)
    assert_is(ct.read(found), made)


def test_schemes_by_name_before_pattern_before_class(tmp_path: Path) -> None:
    section = compressed_section()
    group = section["config_groups"]["group_0"]

    def scheme(bits: int, *targets: str) -> dict[str, Any]:
        return {
            **group,
            "targets": list(targets),
            "weights": {**group["weights"], "num_bits": bits},
        }

    section["config_groups"] = {
        "a": scheme(4, "Linear"),
        "b": scheme(8, "re:x$"),
        "c": scheme(2, "y", "x"),
    }
    for bits, kept in ((2, "abc"), (8, "ab"), (4, "a")):
        groups = {name: section["config_groups"][name] for name in kept}
        made = make((8, 64), bits)
        found = linear(tmp_path / str(bits), as_compressed(made), made.shape)
        ct = open_reader({**section, "config_groups": groups})
        ct.check(found)
        assert_is(ct.read(found), made)


# ---- what is refused ----------------------------------------------------------------------------

ARGS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"weights": {"num_bits": 1}}, "num_bits 1"),
        ({"weights": {"num_bits": 16}}, "num_bits 16"),
        ({"weights": {"num_bits": 4.0}}, r"num_bits 4\.0"),
        ({"weights": {"type": "float"}}, "type 'float'"),
        ({"weights": {"symmetric": None}}, "symmetric None"),
        ({"weights": {"strategy": "block", "group_size": None}}, "strategy 'block'"),
        ({"weights": {"strategy": "tensor", "group_size": None}}, "strategy 'tensor'"),
        ({"weights": {"strategy": "channel"}}, "group_size 32"),
        ({"weights": {"group_size": None}}, "group_size None"),
        ({"weights": {"group_size": 0}}, "group_size 0"),
        ({"weights": {"dynamic": True}}, "dynamic True"),
        ({"weights": {"actorder": "sideways"}}, "actorder 'sideways'"),
        ({"weights": {"block_structure": [2, 2]}}, "sets block_structure"),
        ({"weights": {"unheard": 1}}, "sets unheard"),
        ({"group": {"input_activations": ARGS}}, "sets input_activations"),
        ({"group": {"output_activations": ARGS}}, "sets output_activations"),
        ({"group": {"format": "int-quantized"}}, "format 'int-quantized'"),
        ({"group": {"targets": "Linear"}}, "targets are 'Linear'"),
        ({"group": {"targets": ["re:("]}}, "targets are"),
        ({"group": {"weights": None}}, "no scheme with `weights`"),
        ({"group": {"unheard": 1}}, "sets unheard"),
        ({"format": "int-quantized"}, "format 'int-quantized'"),
        ({"format": "float-quantized"}, "format 'float-quantized'"),
        ({"format": None}, "format None"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16: is no scheme"),
        ({"config_groups": {}}, "no config_groups"),
        ({"quantization_status": "frozen"}, "quantization_status 'frozen'"),
        ({"kv_cache_scheme": ARGS}, "sets kv_cache_scheme"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sets sparsity_config"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "sets transform_config"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head'"),
        ({"unheard": 1}, "sets unheard"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        reader(**changes)


def test_what_is_wrong_with_a_config_is_said_at_once() -> None:
    with pytest.raises(Problems) as caught:
        reader({"num_bits": 16, "type": "float"}, {"input_activations": ARGS}, unheard=1)
    assert len(caught.value.problems) == 2
    inner = caught.value.problems[1]
    assert isinstance(inner, Problems) and len(inner.problems) == 3


def test_what_is_neutral_may_be_null_or_set() -> None:
    dense = {"format": "dense", "global_sparsity": 0.1}
    reader(sparsity_config=dense, transform_config={}, version="0.20.1", unheard=None)
    reader({"strategy": None, "scale_dtype": None, "zp_dtype": "torch.int8"}, ignore=None)
    reader({"strategy": None, "group_size": -1})
    reader(group={"format": "pack-quantized"}, format="mixed-precision")


BENDS: dict[str, Any] = {
    "missing": lambda t: None,
    "turned": lambda t: t.T,
    "short": lambda t: t[:-1],
    "int64": torch.Tensor.long,
    "float64": torch.Tensor.double,
    "negative": torch.neg,
    "beyond": lambda t: t + 1,
    "one-sided": torch.zeros_like,
}


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ("weight_packed missing", StoreError, "has no weight_packed"),
        ("weight_scale missing", StoreError, "has no weight_scale"),
        ("weight_zero_point missing", StoreError, "has no weight_zero_point"),
        ("weight_shape missing", StoreError, "has no weight_shape"),
        ("weight_g_idx missing", StoreError, "has no weight_g_idx"),
        ("weight_packed turned", StoreError, r"weight_packed is int32 \[8, 12\]"),
        ("weight_packed int64", StoreError, "weight_packed is int64"),
        ("weight_scale float64", StoreError, "weight_scale is float64"),
        ("weight_zero_point short", StoreError, r"weight_zero_point is int32 \[1, 2\]"),
        ("weight_shape beyond", StoreError, r"weight_shape is \[13, 65\]"),
        ("weight_scale negative", GridError, "scales that are negative"),
        ("weight_g_idx beyond", StoreError, "not in 2 groups of 32 each"),
        ("weight_g_idx one-sided", StoreError, "not in 2 groups of 32 each"),
    ],
)
def test_tensors_that_are_refused(
    change: str, error: type[OngridError], word: str, tmp_path: Path
) -> None:
    made = make((12, 64), order=True)
    tensors = as_compressed(made, order=True)
    part, how = change.split()
    bent = {**tensors, part: BENDS[how](tensors[part])}
    found = linear(tmp_path, {k: t for k, t in bent.items() if t is not None}, made.shape)
    with pytest.raises(error, match=word) as caught:
        reader({"actorder": "group"}).check(found)
    assert caught.value.where == "x"
    assert caught.value.remedy


def test_parts_that_the_config_gives_no_meaning_are_refused(tmp_path: Path) -> None:
    made = make((12, 64), sym=True)
    found = linear(tmp_path / "a", as_compressed(made), made.shape)
    with pytest.raises(StoreError, match="has a weight_zero_point"):
        reader({"symmetric": True}).check(found)
    tensors = {**as_compressed(made), "weight_g_idx": ints(made.groups)}
    with pytest.raises(StoreError, match="has a weight_g_idx"):
        reader().check(linear(tmp_path / "b", tensors, made.shape))


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    made = make((12, 64))
    found = linear(tmp_path, as_compressed(made), made.shape)
    with pytest.raises(GridError, match="64 columns do not divide into blocks of 48"):
        reader({"group_size": 48}).check(found)


def test_targets_and_ignored_modules_must_fit_the_files(tmp_path: Path) -> None:
    made = make((12, 64))
    found = linear(tmp_path, as_compressed(made), made.shape)
    for ignored in (["x"], ["re:.*"], ["Linear"]):
        with pytest.raises(StoreError, match="x: is quantized in the files, but ignored"):
            reader(ignore=ignored).check(found)
    with pytest.raises(StoreError, match="not at all"):
        reader(group={"targets": ["y"]}).check(found)
    section = compressed_section()
    section["config_groups"]["again"] = section["config_groups"]["group_0"]
    with pytest.raises(StoreError, match="more than once"):
        open_reader(section).check(found)
