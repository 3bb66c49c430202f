"""The proof holds of what was written, and fails of all else, naming the matrix or the file."""

import json
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from export.artifacts import FIRST, GATE, LINEARS, UP, a_matrix, write_artifact
from ongrid.errors import StoreError
from ongrid.export import Verification, verify
from ongrid.export.referee import Referee
from ongrid.grid import QTensor
from ongrid.store.artifact import REST, Artifact, layer_segment
from ongrid.store.shards import INDEX_FILE, ShardFile, tensor_hash, write_shard


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "q"
    write_artifact(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "q"))


Tensors = dict[str, Tensor]
Record = dict[str, Any]


def rewrite(folder: Path, change: Callable[[Tensors, Record], object]) -> None:
    """Changes the first layer and writes it with hashes, index and manifest that fit."""
    artifact = Artifact.open(folder)
    file = ShardFile(folder / FIRST)
    tensors = {name: file.read(name) for name in file.infos}
    record = json.loads(file.metadata["ongrid"])
    change(tensors, record)
    del record["hash"], record["segment"]
    artifact.write(layer_segment(0), tensors, record)
    artifact.finish({}, [])


def edit_json(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    plain = json.loads((folder / name).read_bytes())
    change(plain)
    (folder / name).write_text(json.dumps(plain))


def edit_matrix(folder: Path, path: str, **fields: Any) -> None:
    edit_json(folder, "ongrid.json", lambda plain: plain["matrices"][path].update(fields))


def part(tensors: Tensors, path: str, name: str) -> Tensor:
    return tensors[f"{path}.weight_quantizer.{name}"]


def proof(folder: Path) -> Verification:
    found = verify(folder, fresh_process=False)
    assert found.fresh_equals_file is None
    return found


def assert_names(found: Verification, *words: str) -> None:
    """One failure, whose message has all the words."""
    assert not found.ok
    assert len(found.failures) == 1, "\n".join(found.lines())
    for word in words:
        assert word in str(found.failures[0]), str(found.failures[0])
    assert any(line.startswith("FAILED") for line in found.lines())


# ---- what holds ---------------------------------------------------------------------------------


def test_an_artifact_as_it_was_written_is_proved(pristine: Path) -> None:
    found = verify(pristine)
    assert found.ok, "\n".join(found.lines())
    assert (found.segments, found.damaged, found.matrices) == (3, 0, 8)
    assert (found.used_equals_file, found.library_equals_file, found.fresh_equals_file) == (8, 8, 8)
    assert found.lines() == [
        "segments have their recorded content         3 of 3",
        "matrices: used by the layer == file          8 of 8",
        "matrices: decoded by ongrid == file          8 of 8",
        "matrices: loaded by a fresh process == file  8 of 8",
    ]


def test_the_referee_reads_the_folder_by_itself(pristine: Path) -> None:
    referee = Referee(pristine)
    assert set(referee.matrices) == set(Artifact.open(pristine).manifest.matrices)
    for path in referee.matrices:
        q, dtype = a_matrix(path)
        assert (
            referee.decode(path).hash == tensor_hash(q.dequantize(dtype)) == referee.recorded(path)
        )


def test_an_incomplete_artifact_is_no_subject(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(StoreError, match="not complete"):
        verify(folder)
    (folder / "ongrid.json").unlink()
    with pytest.raises(StoreError, match="no artifact here"):
        verify(folder)


# ---- matrices changed, with content hashes that fit ---------------------------------------------


def flip_a_code_bit(tensors: Tensors, path: str) -> None:
    part(tensors, path, "codes")[3, 5] ^= 1


def one_ulp_of_a_scale(tensors: Tensors, path: str) -> None:
    name = "scale" if path != "layers.0.down" else "scale.codes"
    s = part(tensors, path, name)
    s.view(torch.uint8 if s.dtype == torch.uint8 else torch.int16)[2, 1] += 1


def swap_two_scales(tensors: Tensors, path: str) -> None:
    s = part(tensors, path, "scale")
    assert s[2, 0] != s[2, 1]
    s[2] = s[2].flip(0)


def zero_off_by_one(tensors: Tensors, path: str) -> None:
    z = part(tensors, path, "zero")
    z[1, 1] += 1 if z.dtype == torch.uint8 else z[1, 1] / 128


def another_group(tensors: Tensors, path: str) -> None:
    order = part(tensors, path, "order")
    order[7] = 1 - order[7]


@pytest.mark.parametrize(
    ("path", "corrupt"),
    [
        *((f"layers.0.{name}", flip_a_code_bit) for name in LINEARS),
        *((f"layers.0.{name}", one_ulp_of_a_scale) for name in LINEARS),
        (UP, swap_two_scales),
        ("layers.0.ordered", swap_two_scales),
        (UP, zero_off_by_one),
        (GATE, zero_off_by_one),
        ("layers.0.ordered", another_group),
    ],
)
def test_a_changed_matrix_is_not_the_one_that_was_used(
    folder: Path, path: str, corrupt: Callable[[Tensors, str], None]
) -> None:
    rewrite(folder, lambda tensors, record: corrupt(tensors, path))
    found = proof(folder)
    assert_names(found, path, "multiplied with another matrix", "fetch the artifact again")
    assert (found.damaged, found.used_equals_file, found.library_equals_file) == (0, 7, 8)


def test_the_files_are_the_same_to_every_reader_even_if_they_were_changed(folder: Path) -> None:
    rewrite(folder, lambda tensors, record: flip_a_code_bit(tensors, UP))
    found = verify(folder)
    assert_names(found, UP)
    assert (found.used_equals_file, found.library_equals_file, found.fresh_equals_file) == (7, 8, 8)


def test_a_record_of_another_matrix_is_found(folder: Path) -> None:
    def change(tensors: Tensors, record: Record) -> None:
        record["used"][UP] = record["used"][GATE]

    rewrite(folder, change)
    assert_names(proof(folder), UP, "multiplied with another matrix")


@pytest.mark.parametrize("found", [None, 3, ["a"]])
def test_a_matrix_without_a_record_is_not_proved(folder: Path, found: Any) -> None:
    def change(tensors: Tensors, record: Record) -> None:
        record["used"][UP] = found

    rewrite(folder, change)
    assert_names(proof(folder), UP, "nothing records")


def test_a_segment_without_records_is_not_proved(folder: Path) -> None:
    rewrite(folder, lambda tensors, record: record.pop("used"))
    found = proof(folder)
    assert {failure.where for failure in found.failures} == {f"layers.0.{name}" for name in LINEARS}
    assert found.used_equals_file == 4


def test_a_record_of_no_matrix_is_found(folder: Path) -> None:
    def change(tensors: Tensors, record: Record) -> None:
        record["used"]["layers.0.ghost"] = record["used"][UP]

    rewrite(folder, change)
    assert_names(proof(folder), "layers.0.ghost", "the manifest does not list it")


def test_numbers_that_are_none_are_found(folder: Path) -> None:
    rewrite(folder, lambda tensors, record: part(tensors, UP, "scale").fill_(float("nan")))
    found = proof(folder)
    assert_names(found, UP, "NaN")
    assert (found.used_equals_file, found.library_equals_file) == (7, 7)


def test_a_zero_that_is_no_code_is_found(folder: Path) -> None:
    rewrite(folder, lambda tensors, record: part(tensors, UP, "zero").fill_(99))
    assert_names(proof(folder), UP, "zero 99 is no code of 4 bits")


# ---- names --------------------------------------------------------------------------------------


def rename(before: str, after: str) -> Callable[[Tensors, Record], None]:
    def change(tensors: Tensors, record: Record) -> None:
        for name in [name for name in tensors if before in name]:
            tensors[name.replace(before, after)] = tensors.pop(name)

    return change


def test_a_renamed_tensor_is_found(folder: Path) -> None:
    rewrite(folder, rename(f"{UP}.weight_quantizer.scale", f"{UP}.weight_quantizer.scales"))
    assert_names(proof(folder), UP, "no tensor 'scale'")


def test_a_surplus_tensor_is_found(folder: Path) -> None:
    def change(tensors: Tensors, record: Record) -> None:
        tensors[f"{UP}.weight_quantizer.extra"] = torch.zeros(3)

    rewrite(folder, change)
    assert_names(proof(folder), UP, "has no tensor extra")


def test_a_renamed_matrix_is_found(folder: Path) -> None:
    rewrite(folder, rename(f"{UP}.weight", f"{UP}s.weight"))
    found = proof(folder)
    assert {failure.where for failure in found.failures} == {UP, f"{UP}s"}


def test_a_matrix_that_is_stored_twice_is_found(folder: Path) -> None:
    def change(tensors: Tensors, record: Record) -> None:
        tensors[f"{UP}.weight"] = torch.zeros(48, 64)

    rewrite(folder, change)
    assert_names(proof(folder), UP, "as floats too")


def test_a_static_quantizer_without_its_range_is_found(folder: Path) -> None:
    rewrite(folder, lambda tensors, record: tensors.pop(f"{UP}.input_quantizer.scale"))
    assert_names(proof(folder), f"{UP}.input_quantizer", "no stored range")


# ---- the manifest and the index -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("layers.0.ordered", {"grid": "e2m1.32.sym.fp16"}, "multiplied with another matrix"),
        ("layers.0.ordered", {"grid": "nf4.32.sym.fp16"}, "multiplied with another matrix"),
        (UP, {"grid": "int4.32.code.bf16"}, "scale is fp16"),
        (UP, {"grid": "int4.16.code.fp16"}, "scale is fp16 [48, 2], not fp16 [48, 4]"),
        (UP, {"grid": "int4.32.sym.fp16"}, "has no tensor zero"),
        (UP, {"grid": "int4"}, "does not know the grid 'int4'"),
        (UP, {"dtype": "float16"}, "multiplied with another matrix"),
        (UP, {"dtype": "float8"}, "not that of a matrix"),
        (UP, {"shape": [64, 48]}, "blocks of 1 x 32"),
        (UP, {"shape": [48, 2**50]}, "codes is code [48, 32]"),
        (UP, {"shape": [48]}, "not that of a matrix"),
    ],
)
def test_an_edited_manifest_is_found(
    folder: Path, path: str, fields: dict[str, Any], words: str
) -> None:
    edit_matrix(folder, path, **fields)
    found = proof(folder)
    assert_names(found, path, words)
    assert found.used_equals_file == 7


def test_a_matrix_that_the_manifest_forgot_is_found(folder: Path) -> None:
    edit_json(folder, "ongrid.json", lambda plain: plain["matrices"].pop(UP))
    found = proof(folder)
    assert {failure.where for failure in found.failures} == {UP}
    assert found.matrices == 7


def test_a_matrix_that_the_manifest_invented_is_found(folder: Path) -> None:
    def change(plain: Any) -> None:
        plain["matrices"]["layers.0.ghost"] = plain["matrices"][UP]

    edit_json(folder, "ongrid.json", change)
    assert_names(proof(folder), "layers.0.ghost", "no file")


def test_an_index_that_leads_elsewhere_is_found(folder: Path) -> None:
    name = f"{UP}.weight_quantizer.scale"

    def change(plain: Any) -> None:
        plain["weight_map"][name] = f"model-{REST}.safetensors"

    edit_json(folder, INDEX_FILE, change)
    found = proof(folder)
    assert not found.ok
    assert any(name in str(failure) and INDEX_FILE in str(failure) for failure in found.failures)
    assert any(failure.where == UP for failure in found.failures)


def test_an_index_that_is_gone_is_found(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    found = verify(folder)
    assert not found.ok
    assert any(INDEX_FILE in str(failure) for failure in found.failures)
    assert (found.used_equals_file, found.fresh_equals_file) == (0, 0)


# ---- the files ----------------------------------------------------------------------------------


def test_a_changed_byte_is_found_by_its_segment_and_by_its_matrix(folder: Path) -> None:
    info = ShardFile(folder / FIRST).infos[f"{UP}.weight_quantizer.codes"]
    with (folder / FIRST).open("r+b") as file:
        file.seek(info.start + 100)
        (byte,) = file.read(1)
        file.seek(info.start + 100)
        file.write(bytes([byte ^ 64]))
    found = proof(folder)
    assert [failure.where for failure in found.failures] == [str(folder / FIRST), UP]
    assert (found.damaged, found.used_equals_file, found.library_equals_file) == (1, 7, 8)


def test_a_changed_byte_of_a_float_is_found(folder: Path) -> None:
    file = folder / f"model-{REST}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert_names(proof(folder), str(file), "does not match its recorded hash")


@pytest.mark.parametrize("kept", [0, 5, 700, -1])
def test_a_truncated_file_is_found_and_the_others_are_still_proved(folder: Path, kept: int) -> None:
    content = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(content[:kept])
    found = proof(folder)
    assert str(folder / FIRST) in {failure.where for failure in found.failures}
    assert found.damaged == 1
    assert found.used_equals_file == (4 if kept >= 0 else 7)


def test_a_deleted_file_is_found_and_the_others_are_still_proved(folder: Path) -> None:
    (folder / FIRST).unlink()
    found = proof(folder)
    named = {failure.where for failure in found.failures}
    assert named >= {str(folder / FIRST)} | {f"layers.0.{name}" for name in LINEARS}
    assert (found.damaged, found.used_equals_file) == (1, 4)


def test_files_that_changed_places_are_found(folder: Path) -> None:
    second = folder / f"model-{layer_segment(1)}.safetensors"
    (folder / FIRST).rename(folder / "away")
    second.rename(folder / FIRST)
    (folder / "away").rename(second)
    found = proof(folder)
    assert {failure.where for failure in found.failures} >= {str(folder / FIRST), str(second)}
    assert found.damaged == 2


def test_a_segment_under_another_name_is_found(folder: Path) -> None:
    artifact = Artifact.open(folder)
    second = layer_segment(1)
    (folder / f"model-{second}.safetensors").rename(folder / "model-second.safetensors")
    artifact.manifest.segments[1] = "second"
    Artifact(folder, replace(artifact.manifest), complete=False).finish({}, [])
    assert_names(proof(folder), "second", second)


def test_a_stray_file_is_found(folder: Path) -> None:
    stray = folder / "model-stray.safetensors"
    shutil.copy(folder / f"model-{REST}.safetensors", stray)
    found = proof(folder)
    assert {failure.where for failure in found.failures} == {
        str(folder / "model-stray.safetensors")
    }


def test_a_file_that_the_index_forgot_is_found(folder: Path) -> None:
    rest = f"model-{REST}.safetensors"

    def change(plain: Any) -> None:
        kept = {name: file for name, file in plain["weight_map"].items() if file != rest}
        plain["weight_map"] = kept

    edit_json(folder, INDEX_FILE, change)
    assert_names(proof(folder), str(folder / rest), "the index does not list")


def test_a_file_that_the_manifest_forgot_is_found(folder: Path) -> None:
    stray = "model-stray.safetensors"
    write_shard(folder / stray, {"stray.weight": torch.ones(3)}, {})
    edit_json(folder, INDEX_FILE, lambda plain: plain["weight_map"].update({"stray.weight": stray}))
    assert_names(proof(folder), str(folder / stray), "ongrid.json does not list")


def test_a_header_that_contradicts_itself_is_found(folder: Path) -> None:
    content = (folder / FIRST).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].replace(b'"shape":[48,32]', b'"shape":[48,31]')
    (folder / FIRST).write_bytes(content[:8] + header + content[8 + length :])
    found = proof(folder)
    assert {UP, str(folder / FIRST)} <= {failure.where for failure in found.failures}


# ---- the library and the fresh process ----------------------------------------------------------


def test_a_library_that_decodes_otherwise_is_found(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = QTensor.dequantize

    def wrong(self: QTensor, dtype: torch.dtype) -> Tensor:
        w = right(self, dtype)
        if self.shape == (48, 64) and dtype == torch.bfloat16:
            w[5, 7] *= 1.01
        return w

    monkeypatch.setattr(QTensor, "dequantize", wrong)
    found = proof(pristine)
    assert {failure.where for failure in found.failures} == {UP, "layers.1.up"}
    assert "1 of 3072 numbers" in str(found.failures[0])
    assert "[5, 7]" in str(found.failures[0])
    assert "fault of ongrid" in str(found.failures[0])
    assert (found.used_equals_file, found.library_equals_file) == (8, 6)


def with_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """A module that a fresh process finds through the environment."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "impostor.py").write_text(source)
    paths = [str(tmp_path / "modules"), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    return "impostor"


def test_a_fresh_process_that_computes_otherwise_is_found(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {path: Referee(pristine).recorded(path) for path in Referee(pristine).matrices}
    changed = {**used, UP: used[GATE], "layers.7.up": used[UP]}
    del changed[GATE]
    source = f"print('loading'); print({json.dumps(json.dumps(changed))})"
    found = verify(pristine, fresh_module=with_module(tmp_path, monkeypatch, source))
    assert {failure.where for failure in found.failures} == {UP, GATE, "layers.7.up"}
    assert found.fresh_equals_file == 6


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("raise ValueError('first\\n  second')", "ValueError: first\n  second"),
        ("print('nothing')", "printed no table"),
        ("print('[]')", "printed no table"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
    ],
)
def test_a_fresh_process_that_fails_is_a_failure(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    found = verify(pristine, fresh_module=with_module(tmp_path, monkeypatch, source))
    assert_names(found, str(pristine), words)
    assert found.fresh_equals_file == 0


def test_a_fresh_process_takes_no_code_from_the_current_folder(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "impostor.py").write_text("print('{}')")
    monkeypatch.chdir(tmp_path)
    assert_names(verify(pristine, fresh_module="impostor"), "No module named impostor")
