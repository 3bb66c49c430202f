"""The safetensors package is the referee: it reads what we write and writes what we read."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ongrid.errors import StoreError
from ongrid.store import shards
from ongrid.store.shards import (
    INDEX_FILE,
    MODEL_FILE,
    ShardFile,
    ShardFolder,
    content_hash,
    remove_partials,
    tensor_hash,
    write_bytes,
    write_json,
    write_shard,
)

SRC = Path(shards.__file__).parents[2]
DTYPES = list(shards._DTYPES.values())
SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (3, 7), (2, 3, 4)]


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit pattern, NaNs with payloads among them; a bool is 0 or 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    raw = raw & 1 if dtype is torch.bool else raw
    return raw.view(dtype).reshape(shape)


def zoo() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"{d}/{s}": noise(s, d) for d in DTYPES for s in SHAPES}


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert raw(found) == raw(expected)


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


def entry(start: Any, end: Any, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    shape = [end - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# --- round trips ---------------------------------------------------------------------------------


def test_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    tensors = zoo()
    write_shard(tmp_path / "a.safetensors", tensors, {"format": "pt", "ü": '"\n'})
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "ü": '"\n'}
    views = dict(safetensors.deserialize((tmp_path / "a.safetensors").read_bytes()))
    assert views.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert views[name]["shape"] == list(tensor.shape)
        assert views[name]["data"] == raw(tensor)
    for name, tensor in safetensors.torch.load_file(tmp_path / "a.safetensors").items():
        assert_same(tensor, tensors[name])


def test_we_read_what_safetensors_writes(tmp_path: Path) -> None:
    tensors, path = zoo(), tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    file = ShardFile(path)
    assert file.metadata == {"format": "pt"}
    assert file.infos.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info = file.infos[name]
        assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
        assert path.read_bytes()[info.start : info.end] == raw(tensor)
        assert_same(file.read(name), tensor)


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {
        "t": base.T,
        "slice": base[1:3, ::2],
        "expanded": torch.ones(1).expand(5),
        "shared": base,  # the package refuses shared memory; here it is written twice
        "conj": complex_.conj(),
        "neg": complex_.conj().imag,
        "grad": torch.nn.Parameter(base),
    }
    write_shard(tmp_path / "a.safetensors", tensors, {})
    file = ShardFile(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(file.read(name), tensor)


def test_one_number_with_an_idle_stride(tmp_path: Path) -> None:
    one = torch.arange(6, dtype=torch.int32).reshape(3, 2)[1:2, 1:2]
    assert one.stride() == (2, 1) and one.T.is_contiguous()
    write_shard(tmp_path / "a.safetensors", {"one": one.T, "same": one}, {})
    file = ShardFile(tmp_path / "a.safetensors")
    assert file.read("one").tolist() == file.read("same").tolist() == [[3]]


def test_tensors_are_aligned_to_their_elements(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", zoo(), {"k": "v"})
    for info in ShardFile(tmp_path / "a.safetensors").infos.values():
        assert info.start % info.dtype.itemsize == 0


def test_a_file_without_tensors(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", {}, {})
    file = ShardFile(tmp_path / "a.safetensors")
    assert (file.infos, file.metadata) == ({}, {})
    assert safetensors.deserialize((tmp_path / "a.safetensors").read_bytes()) == []


def test_reading_ignores_the_default_device_and_is_its_own_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, {"a": torch.arange(4)}, {})
    with torch.device("meta"):
        first = ShardFile(path).read("a")
    assert torch.equal(first, torch.arange(4))
    first.zero_()
    assert torch.equal(ShardFile(path).read("a"), torch.arange(4))


def test_a_read_in_many_parts_is_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shards, "_READ_BYTES_MAX", 7)
    write_shard(tmp_path / "a.safetensors", {"a": torch.arange(10), "b": torch.arange(3)}, {})
    assert torch.equal(ShardFile(tmp_path / "a.safetensors").read("a"), torch.arange(10))


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="reads and resets the peak in /proc")
def test_reading_allocates_one_copy(tmp_path: Path) -> None:
    def kib(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    path, nbytes = tmp_path / "a.safetensors", 64 << 20
    for name in ("a", "b"):  # the peak must not come from the untouched neighbour either
        write_shard(path, {n: torch.ones(nbytes, dtype=torch.uint8) for n in ("a", "b")}, {})
        file = ShardFile(path)
        Path("/proc/self/clear_refs").write_text("5")
        before = kib("VmRSS")
        tensor = file.read(name)
        grown = (kib("VmHWM") - before) << 10
        assert tensor.nbytes == nbytes
        assert 0.9 * nbytes < grown < 1.1 * nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    write_shard(tmp_path / MODEL_FILE, {"a": torch.arange(4)}, {})
    before = os.listdir("/proc/self/fd")
    folder = ShardFolder(tmp_path)
    folder.read("a")
    folder.digest()
    write_json(tmp_path / "a.json", {})
    assert os.listdir("/proc/self/fd") == before


# --- determinism and atomicity -------------------------------------------------------------------

SCRIPT = """
import os, sys, torch
from pathlib import Path
from ongrid.store import shards
folder = Path(sys.argv[1])
tensors = {n: torch.full((3,), i) for i, n in enumerate("bca")} | {"h": torch.ones(5).half()}
shards.write_shard(folder / "child.safetensors", tensors, {k: "v" for k in "zyxwv"})
os.replace = lambda *_: os._exit(9)
shards.write_shard(folder / "killed.safetensors", tensors, {})
"""


def test_another_process_writes_the_same_bytes_and_dies_clean(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(SRC), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=env, check=False)
    assert done.returncode == 9
    assert {p.name for p in tmp_path.iterdir()} == {
        "child.safetensors",
        ".killed.safetensors.partial",
    }
    remove_partials(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["child.safetensors"]
    tensors = {n: torch.full((3,), i) for i, n in enumerate("bca")} | {"h": torch.ones(5).half()}
    backwards = dict(reversed(tensors.items()))
    write_shard(tmp_path / "mine.safetensors", backwards, {k: "v" for k in "vwxyz"})
    mine, child = (tmp_path / f"{n}.safetensors" for n in ("mine", "child"))
    assert mine.read_bytes() == child.read_bytes()


def failing_disk(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        write_shard(path, {"a": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing_tensor(path: Path) -> None:
    write_shard(path, {"a": torch.zeros(9), "b": torch.zeros(9, device="meta")}, {})


@pytest.mark.parametrize("fail", [failing_disk, failing_tensor])
def test_a_failed_write_leaves_the_old_file_and_no_partial(
    tmp_path: Path, fail: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(StoreError, match=r"a\.safetensors"):
        fail(path)
    assert list(tmp_path.iterdir()) == []
    write_shard(path, {"a": torch.arange(4)}, {})
    with pytest.raises(StoreError):
        fail(path)
    assert list(tmp_path.iterdir()) == [path]
    assert torch.equal(ShardFile(path).read("a"), torch.arange(4))


def test_an_interrupt_leaves_no_partial(tmp_path: Path, monkeypatch: Any) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "a", b"x")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_places(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"x")
    for path in (tmp_path / "no" / "a", tmp_path / "file" / "a", tmp_path):
        with pytest.raises(StoreError, match="cannot be written"):
            write_bytes(path, b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_remove_partials_leaves_everything_else(tmp_path: Path) -> None:
    for name in (".a.partial", "b.partial", ".c", "d.safetensors"):
        write_bytes(tmp_path / name, b"")
    remove_partials(tmp_path)
    remove_partials(tmp_path / "absent")
    assert {p.name for p in tmp_path.iterdir()} == {"b.partial", ".c", "d.safetensors"}


def test_json_is_sorted_readable_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": [1], "a": "ü"})
    assert path.read_bytes() == '{\n  "a": "ü",\n  "b": [\n    1\n  ]\n}\n'.encode()
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (float("nan"), {"a": float("inf")}, {1, 2}, {"a": 1, 2: 3}, "\ud800", cycle):
        with pytest.raises(StoreError, match="cannot be written as JSON"):
            write_json(path, value)
    assert json.loads(path.read_text()) == {"b": [1], "a": "ü"}


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"a": torch.zeros(2, dtype=torch.complex128)}, {}),
        ({"a": torch.zeros(2, dtype=torch.float8_e4m3fnuz)}, {}),
        ({"__metadata__": torch.zeros(2)}, {}),
        ({"\ud800": torch.zeros(2)}, {}),
        ({"a": torch.zeros(2)}, {"k": "\ud800"}),
        ({"a": torch.eye(2).to_sparse()}, {}),
    ],
)
def test_what_the_format_cannot_hold_is_not_written(
    tmp_path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]
) -> None:
    with pytest.raises(StoreError, match=r"x\.safetensors"):
        write_shard(tmp_path / "x.safetensors", tensors, metadata)
    assert list(tmp_path.iterdir()) == []


def test_no_header_is_written_that_is_too_long_to_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shards, "_HEADER_BYTES_MAX", 100)
    write_shard(tmp_path / "a.safetensors", {}, {"k": "x" * 70})
    with pytest.raises(StoreError, match=r"(?s)needs a header of 112 bytes.*Keep less"):
        write_shard(tmp_path / "b.safetensors", {}, {"k": "x" * 80})
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


# --- damaged files -------------------------------------------------------------------------------

DAMAGED = {
    "empty": (b"", "0 bytes and breaks off"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "7 bytes and breaks off"),
    "length above the file": (file_bytes({}, length=3), "declares a header of 3 bytes"),
    "length below the cap": (file_bytes({}, length=99_999_999), "declares a header of 99999999"),
    "length huge": (b"\xff" * 8 + b"{}", "declares a header of 18446744073709551615"),
    "length zero": (bytes(8), "invalid header"),
    "pickle": (b"PK\x03\x04" + bytes(100), "declares a header of"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "no json": (file_bytes(b"{'a'}"), "invalid header"),
    "no utf-8": (file_bytes(b'{"\xff": 1}'), "invalid header"),
    "surrogate": (file_bytes(b'{"\\ud800": 1}'), "invalid header"),
    "deep": (file_bytes(b"[" * 200_000), "invalid header"),
    "long number": (file_bytes(b'{"a": ' + b"1" * 5000 + b"}"), "invalid header"),
    "list": (file_bytes([]), "not a JSON object"),
    "duplicate": (
        file_bytes(b'{"a": %b, "a": %b}' % ((json.dumps(entry(0, 1)).encode(),) * 2), b"x"),
        "'a' stands twice",
    ),
    "duplicate within": (file_bytes(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "'dtype' stands"),
    "metadata list": (file_bytes({"__metadata__": ["a"]}), "maps strings to strings"),
    "metadata number": (file_bytes({"__metadata__": {"a": 1}}), "maps strings to strings"),
    "entry": (file_bytes({"a": 1}), "'a' lacks"),
    "no dtype": (file_bytes({"a": {"shape": [], "data_offsets": [0, 1]}}, b"x"), "'a' lacks"),
    "text shape": (file_bytes({"a": entry(0, 1, shape="1")}, b"x"), "'a' lacks"),
    "offsets": (file_bytes({"a": {**entry(0, 1), "data_offsets": [0]}}, b"x"), "'a' lacks"),
    "dtype": (file_bytes({"a": entry(0, 1, "Q4")}, b"x"), "unknown dtype 'Q4'"),
    "negative": (file_bytes({"a": entry(-1, 0)}), "not a count"),
    "negative shape": (file_bytes({"a": entry(0, 4, shape=[-2, -2])}, b"xxxx"), "not a count"),
    "float": (file_bytes({"a": entry(0, 1.0, shape=[1])}, b"x"), "not a count"),
    "true": (file_bytes({"a": entry(0, True, shape=[1])}, b"x"), "not a count"),
    "backwards": (file_bytes({"a": entry(1, 0, shape=[1])}, b"x"), "does not fill"),
    "dtype x shape": (file_bytes({"a": entry(0, 4, "F32", [2])}, b"xxxx"), "does not fill"),
    "huge": (file_bytes({"a": entry(0, 0, shape=[0, 2**63])}), "not a count"),
    "strides": (file_bytes({"a": entry(0, 0, shape=[0, 2**62, 2])}), "does not fill"),
    "overlap": (file_bytes({"a": entry(0, 2), "b": entry(1, 3)}, b"xxx"), "'b' .* overlaps"),
    "same place": (file_bytes({"a": entry(0, 2), "b": entry(0, 2)}, b"xx"), "overlaps"),
    "empty inside": (file_bytes({"a": entry(0, 2), "b": entry(1, 1)}, b"xx"), "overlaps"),
    "hole": (file_bytes({"a": entry(1, 2)}, b"xx"), "'a' .* follows a hole"),
    "truncated": (file_bytes({"a": entry(0, 4)}, b"xxx"), "is truncated"),
    "out of range": (file_bytes({"a": entry(0, 2**40)}, b"xxx"), "is truncated"),
    "trailing": (file_bytes({"a": entry(0, 1)}, b"xx"), "after its last tensor"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = DAMAGED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(StoreError, match=message) as caught:
        ShardFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    assert caught.value.where == str(path)
    assert caught.value.remedy


def test_missing_file_folder_tensor(tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "gone")
    for path in (tmp_path / "a.safetensors", tmp_path, tmp_path / "link.safetensors"):
        with pytest.raises(StoreError, match="no such file"):
            ShardFile(path)
    write_shard(tmp_path / MODEL_FILE, {"layer.0.weight": torch.zeros(1)}, {})
    for source in (ShardFile(tmp_path / MODEL_FILE), ShardFolder(tmp_path)):
        with pytest.raises(StoreError, match=r"no tensor 'layer.1.weight'\n.*layer.0.weight"):
            source.read("layer.1.weight")
    for path in (tmp_path / "no", tmp_path / MODEL_FILE):
        with pytest.raises(StoreError, match="no such folder"):
            ShardFolder(path)


def test_a_file_replaced_after_opening_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, {"a": torch.zeros(4), "b": torch.ones(4)}, {})
    file = ShardFile(path)
    write_shard(path, {"a": torch.ones(4), "c": torch.zeros(4)}, {})
    for use in (lambda: file.read("a"), file.digest):
        with pytest.raises(StoreError, match="has changed"):
            use()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    write_shard(tmp_path / "a.safetensors", {"a": torch.zeros(4)}, {})
    file = ShardFile(tmp_path / "a.safetensors")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(StoreError, match="ends inside tensor 'a'"):
        file.read("a")


VALID = {
    "a.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.tensor(3.0),
    "c": torch.zeros(0, 4, dtype=torch.uint8),
    "d": torch.tensor([1, 2, 3], dtype=torch.int16),
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    write_shard(path.with_name("valid.safetensors"), VALID, {"format": "pt"})
    return path


def refused_or_as_the_reference_reads_it(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        file = ShardFile(path)
        found = {name: file.read(name) for name in file.infos}
    except StoreError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) <= len(content)
    expected = dict(safetensors.deserialize(content))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert list(tensor.shape) == expected[name]["shape"]
        assert raw(tensor) == expected[name]["data"]


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_fuzzed_bytes(scratch: Path, data: st.DataObject) -> None:
    content = bytearray(scratch.with_name("valid.safetensors").read_bytes())
    edits = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for position, byte in data.draw(st.lists(edits, max_size=4)):
        content[position] = byte
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    refused_or_as_the_reference_reads_it(scratch, bytes(content[:end]))


def test_every_truncation_is_refused(scratch: Path) -> None:
    content = scratch.with_name("valid.safetensors").read_bytes()
    for end in range(len(content)):
        scratch.write_bytes(content[:end])
        with pytest.raises(StoreError):
            ShardFile(scratch)


NUMBERS = st.one_of(
    st.integers(0, 8), st.integers(-3, 2**65), st.booleans(), st.none(), st.floats(0, 4)
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F32", "F4", "", None]),
        "shape": st.lists(NUMBERS, max_size=3) | st.lists(st.integers(0, 3), max_size=3),
        "data_offsets": st.lists(NUMBERS, max_size=3)
        | st.lists(st.integers(0, 9), min_size=2, max_size=2).map(sorted),
    },
    optional={"more": st.text(max_size=3)},
)


@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "\ud800"]), ENTRIES),
    count=st.integers(0, 9),
)
@settings(max_examples=300, deadline=None)
def test_fuzzed_headers(scratch: Path, header: dict[str, Any], count: int) -> None:
    refused_or_as_the_reference_reads_it(scratch, file_bytes(header, bytes(range(count))))


# --- folders -------------------------------------------------------------------------------------


def shard_folder(folder: Path, **changes: str) -> dict[str, Tensor]:
    """A sharded model; `changes` are written over the index's weight map."""
    tensors = {f"layers.{i}.weight": torch.full((4,), float(i)) for i in range(4)}
    names = list(tensors)
    folder.mkdir(exist_ok=True)
    weight_map: dict[str, str] = {}
    for file, held in (("s1.safetensors", names[:2]), ("s2.safetensors", names[2:])):
        write_shard(folder / file, {n: tensors[n] for n in held}, {"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map | changes})
    return tensors


def test_a_sharded_folder(tmp_path: Path) -> None:
    tensors = shard_folder(tmp_path)
    folder = ShardFolder(tmp_path)
    assert folder.files == [tmp_path / "s1.safetensors", tmp_path / "s2.safetensors"]
    assert list(folder.infos) == list(tensors)
    assert folder.file_of("layers.3.weight") == tmp_path / "s2.safetensors"
    for name, tensor in tensors.items():
        assert_same(folder.read(name), tensor)
        assert folder.infos[name].shape == (4,)
    with pytest.raises(StoreError, match="no tensor 'x'"):
        folder.file_of("x")


def test_a_folder_of_one_file_and_a_download_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_shard(tmp_path / "blobs" / "hash", {"a": torch.arange(3)}, {})
    (tmp_path / "snapshot" / MODEL_FILE).symlink_to("../blobs/hash")
    write_json(tmp_path / "blobs" / "index", {"weight_map": {"a": "./" + MODEL_FILE}})
    for link in ("", "../blobs/index"):
        if link:
            (tmp_path / "snapshot" / INDEX_FILE).symlink_to(link)
        folder = ShardFolder(tmp_path / "snapshot")
        assert folder.files == [tmp_path / "snapshot" / MODEL_FILE]
        assert torch.equal(folder.read("a"), torch.arange(3))
    (tmp_path / "blobs" / "index").unlink()
    with pytest.raises(StoreError, match="cut off"):
        ShardFolder(tmp_path / "snapshot")


def test_digest_knows_the_bytes_and_not_the_place(tmp_path: Path) -> None:
    shard_folder(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    digest = ShardFolder(tmp_path / "a").digest()
    assert ShardFolder(tmp_path / "b").digest() == digest
    with (tmp_path / "b" / "s2.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert ShardFolder(tmp_path / "b").digest() != digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": "s3.safetensors"}, "'s3.safetensors', which is not in the folder"),
        ({"x": "a\0b"}, "which is not in the folder"),
        ({"x": "n" * 5000}, "which is not in the folder"),
        ({"x": ""}, "which is not in the folder"),
        ({"x": "../s1.safetensors"}, "leads out of the folder"),
        ({"x": "sub/../../s1.safetensors"}, "leads out of the folder"),
        ({"x": "/etc/passwd"}, "leads out of the folder"),
        ({"x": "C:\\s1.safetensors"}, "leads out of the folder"),
        ({"x": "..\\s1.safetensors"}, "leads out of the folder"),
        ({"x": "s1.safetensors"}, "'x' is in s1.safetensors by this index, in no file by"),
        (
            {"layers.0.weight": "s2.safetensors"},
            "'layers.0.weight' is in s2.safetensors by this index, in s1.safetensors by",
        ),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    shard_folder(tmp_path, **changes)
    with pytest.raises(StoreError, match=message) as caught:
        ShardFolder(tmp_path)
    assert caught.value.where == str(tmp_path / INDEX_FILE)


def test_a_tensor_absent_from_the_index(tmp_path: Path) -> None:
    tensors = shard_folder(tmp_path)
    weight_map = dict.fromkeys(list(tensors)[:2], "s1.safetensors")
    write_json(
        tmp_path / INDEX_FILE, {"weight_map": weight_map | {"layers.2.weight": "s2.safetensors"}}
    )
    with pytest.raises(StoreError, match=r"'layers.3.weight' is in no file by this index, in s2"):
        ShardFolder(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    shard_folder(tmp_path)
    write_shard(tmp_path / "s2.safetensors", {"layers.0.weight": torch.ones(4)}, {})
    with pytest.raises(StoreError, match=r"'layers.0.weight' stands in s1.* and in s2"):
        ShardFolder(tmp_path)


def test_an_index_beside_another_model(tmp_path: Path) -> None:
    shard_folder(tmp_path)
    write_shard(tmp_path / MODEL_FILE, {"a": torch.ones(4)}, {})
    with pytest.raises(StoreError, match="which is the model"):
        ShardFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "invalid index"),
        (b"[]", "not a JSON object"),
        (b"{}", "no `weight_map`"),
        (b'{"weight_map": {"a": 1}}', "no `weight_map`"),
        (b'{"weight_map": {"a": "b", "a": "c"}}', "'a' stands twice"),
        (b'{"weight_map": {}}', "names no tensor"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_an_unreadable_index_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    write_bytes(tmp_path / INDEX_FILE, content)
    with pytest.raises(StoreError, match=message):
        ShardFolder(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "no safetensors files"),
        ("pytorch_model.bin", r"pickled weights only[^$]*save_pretrained"),
        ("consolidated.00.pth", "pickled weights only"),
        ("model-Q4_0.gguf", r"GGUF weights only[^$]*gguf_file"),
        ("consolidated.safetensors", "Rename a single file to model.safetensors"),
    ],
)
def test_a_folder_without_safetensors_says_what_to_do(
    tmp_path: Path, file: str, message: str
) -> None:
    write_bytes(tmp_path / file, b"")
    with pytest.raises(StoreError, match=message):
        ShardFolder(tmp_path)


# --- hashes --------------------------------------------------------------------------------------


def test_hashes_see_content_only() -> None:
    tensors = zoo()
    shuffled = list(tensors.items())
    random.Random(0).shuffle(shuffled)
    assert content_hash(dict(shuffled)) == content_hash(tensors)
    square = noise((6, 6), torch.bfloat16)
    assert tensor_hash(square.T.contiguous()) == tensor_hash(square.T)
    assert tensor_hash(square[::2, 1::2].clone()) == tensor_hash(square[::2, 1::2])
    assert tensor_hash(torch.nn.Parameter(torch.ones(2))) == tensor_hash(torch.ones(2))


def test_every_difference_changes_the_hash() -> None:
    variants = [
        torch.zeros(4),
        -torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, 1),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(0, dtype=torch.bool),
    ]
    assert len({tensor_hash(t) for t in variants}) == len(variants)
    assert len({content_hash({"a": t}) for t in variants}) == len(variants)
    a, b = variants[:2]
    pairs = [{"a": a, "b": b}, {"a": b, "b": a}, {"a": a}, {"b": a}, {"ab": a}, {}]
    assert len({content_hash(p) for p in pairs}) == len(pairs)


def test_hashes_are_fixed() -> None:
    """They are stored in artifacts: another definition breaks every artifact on disk."""
    one = hashlib.sha256(b'["int16", [3]]\n' + b"\0\0\1\0\2\0").hexdigest()
    both = hashlib.sha256(b'{"a": "%b", "b": "%b"}' % ((one.encode(),) * 2)).hexdigest()
    tensor = torch.arange(3, dtype=torch.int16)
    assert tensor_hash(tensor) == one
    assert content_hash({"b": tensor, "a": tensor}) == both


def test_tensors_without_memory_have_no_hash() -> None:
    for tensor in (torch.zeros(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises(StoreError, match="no memory to read"):
            tensor_hash(tensor)
        with pytest.raises(StoreError, match=r"tensor 'x\.y'"):
            content_hash({"x.y": tensor})
