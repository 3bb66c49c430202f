"""Tensors on disk: safetensors files that are checked when opened and written whole or not at all.

The format, and all of it (https://github.com/huggingface/safetensors#format): 8 bytes of
little-endian header length N, N bytes of JSON, then the bytes of the tensors without a hole. We
read and write it ourselves, for three reasons. A memory map counts every page that was read as
resident, and peak memory is promised here. The package's writer orders metadata by a randomly
seeded hash, so that the same inputs give other bytes in the next process. And a damaged file is
refused in words that name the file, the tensor and the cure.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path, PureWindowsPath
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Shaped
from torch import Tensor

from ongrid.errors import StoreError

MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_HEADER_BYTES_MAX = 100_000_000  # the bound of the reference implementation
_READ_BYTES_MAX = 1 << 30  # one system call moves less than 2 GiB, on Linux and macOS alike
_LFS_POINTER = b"version https://git-lfs"
_DAMAGED = "It is damaged or incomplete: download or write it again."
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()}
_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor; `start` and `end` are bytes from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class ShardFile(Mapping[str, Tensor]):
    """One safetensors file: the header is checked on opening, a tensor is read when asked for.

    `infos` stands in file order. No descriptor stays open between calls. `StoreError` when the
    file is missing or damaged, or when it has changed since it was opened.
    """

    path: Path
    infos: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    def __init__(self, path: Path) -> None:
        self.path = path = Path(path)
        with _opened(path) as file:
            self._stamp = _stamp(file)
            size = os.fstat(file.fileno()).st_size
            head = file.read(len(_LFS_POINTER))
            _refuse_pointer(head, path)
            if size < 8:
                raise _error(path, f"has {size} bytes and breaks off within the header's length")
            # Checked before the allocation, which one damaged byte would else make huge.
            length = int.from_bytes(head[:8], "little")
            if 8 + length > size or length > _HEADER_BYTES_MAX:
                raise _error(
                    path,
                    f"declares a header of {length} bytes: the file has {size} bytes in all, "
                    f"and the format allows {_HEADER_BYTES_MAX}",
                )
            file.seek(8)
            header = file.read(length)
        self.infos, self.metadata = _parse_header(header, size, path)

    def read(self, name: str) -> Shaped[Tensor, "..."]:
        """The tensor `name` on the CPU, in memory of its own.

        Law: exactly the bytes of the file; allocates `infos[name].nbytes` and no more.
        `StoreError` for an unknown name.
        """
        info = _get(self.infos, name, self.path)
        # The device is named, because callers build models under `torch.device("meta")`.
        tensor = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        memory, done = _memory(tensor, name), 0
        with self._unchanged() as file:
            while done < info.nbytes:
                part = memory[done : done + _READ_BYTES_MAX]
                count = os.preadv(file.fileno(), [part], info.start + done)
                if count == 0:
                    raise _error(self.path, f"ends inside tensor {name!r}")
                done += count
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def digest(self) -> str:
        """SHA-256 of the file's bytes, in hexadecimal."""
        with self._unchanged() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextmanager
    def _unchanged(self) -> Generator[BufferedReader, None, None]:
        # Old offsets applied to a file that took the name since would read plausible numbers.
        with _opened(self.path) as file:
            if _stamp(file) != self._stamp:
                remedy = "Open it again, and let nothing write to the folder meanwhile."
                raise _error(self.path, "has changed since its header was read", remedy)
            yield file


class ShardFolder:
    """The tensors of a Hugging Face folder: `model.safetensors`, or the files its index names.

    Law: the index and the headers put the same tensors in the same files, each in one only.
    `StoreError` when they do not, or when there is nothing to read.
    """

    folder: Path
    infos: Mapping[str, TensorInfo]
    files: list[Path]

    def __init__(self, folder: Path) -> None:
        self.folder = folder = Path(folder)
        listed = _listed_files(folder)
        self.files = sorted(set(listed.values())) if listed else [folder / MODEL_FILE]
        self._files = [ShardFile(path) for path in self.files]
        self._home: dict[str, ShardFile] = {}
        for file in self._files:
            for name in file.infos:
                if name in self._home:
                    both = f"{self.file_of(name).name} and in {file.path.name}"
                    remedy = "Remove the file that does not belong to this model."
                    raise _error(folder, f"tensor {name!r} stands in {both}", remedy)
                self._home[name] = file
        self.infos = {name: file.infos[name] for name, file in self._home.items()}
        if listed:
            self._check_index(listed)

    def read(self, name: str) -> Shaped[Tensor, "..."]:
        """The tensor `name`; law and errors of `ShardFile.read`."""
        return _get(self._home, name, self.folder).read(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.infos.values())

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor `name`; `StoreError` for an unknown name."""
        return _get(self._home, name, self.folder).path

    def digest(self) -> str:
        """SHA-256, in hexadecimal, over the digests of the files in the order of their names.

        Law: the same files in another folder give the same digest. Reads every byte once.
        """
        digests = "".join(file.digest() for file in self._files)
        return hashlib.sha256(bytes.fromhex(digests)).hexdigest()

    def _check_index(self, listed: Mapping[str, Path]) -> None:
        held = {name: file.path for name, file in self._home.items()}
        wrong = [n for n in sorted({*listed, *held}) if listed.get(n) != held.get(n)]
        for name in wrong[:1]:
            says, has = (
                files[name].name if name in files else "no file" for files in (listed, held)
            )
            raise _error(
                self.folder / INDEX_FILE,
                f"tensor {name!r} is in {says} by this index, in {has} by the files' headers"
                f" ({len(wrong)} such tensors)",
                "Fetch the index and the files again, from one revision of the model.",
            )


def content_hash(tensors: Mapping[str, Shaped[Tensor, "..."]]) -> str:
    """SHA-256, in hexadecimal, over names and tensor hashes in the order of names.

    Law: independent of device, strides and insertion order; another name, dtype, shape or bit
    gives another hash. `StoreError` for a tensor without memory of its own (meta, sparse).
    """
    hashes = {name: _hash(tensor, f"tensor {name!r}") for name, tensor in tensors.items()}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def tensor_hash(tensor: Shaped[Tensor, "..."]) -> str:
    """SHA-256, in hexadecimal, over dtype, shape and bytes; law and errors of `content_hash`."""
    return _hash(tensor, "tensor")


def write_shard(
    path: Path, tensors: Mapping[str, Shaped[Tensor, "..."]], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file in one step, replacing one of that name.

    Law: the same tensors and metadata give the same bytes in every process; a file of that name
    is old or new, whole and on the disk. Copies one tensor at a time, and only if it is strided
    or on a device. `StoreError` for what the format cannot hold and for a disk that refuses.
    """
    # Widest dtypes first: each tensor is then aligned to its element, as readers that map expect.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _TAGS or name == "__metadata__":
            remedy = f"The name '__metadata__' is taken. The dtypes are {', '.join(_DTYPES)}."
            raise _error(path, f"cannot hold a tensor {name!r} of dtype {tensor.dtype}", remedy)
        start, position = position, position + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": _TAGS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, position],
        }
    head = _to_json(header, path, separators=(",", ":"))
    head += b" " * (-len(head) % 8)
    if len(head) > _HEADER_BYTES_MAX:
        what = f"needs a header of {len(head)} bytes, above the format's {_HEADER_BYTES_MAX}"
        raise _error(path, what, "Keep less in the metadata, or write several files.")
    # Nothing is written that could not be read: the reader's own checks judge the header.
    _parse_header(head, 8 + len(head) + position, path)
    with _replacing(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            file.write(_memory(tensors[name], f"{path}: tensor {name!r}"))


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file in one step, whole or not at all; `StoreError` when the disk refuses."""
    with _replacing(path) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of JSON with sorted keys; `StoreError` for NaN, infinity and foreign types."""
    write_bytes(path, _to_json(value, path, sort_keys=True, indent=2) + b"\n")


def remove_partials(folder: Path) -> None:
    """Removes what a killed run left half written in this folder (not in those below it)."""
    for partial in Path(folder).glob(".*.partial"):
        partial.unlink(missing_ok=True)


def _parse_header(
    header: bytes, size: int, path: Path
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors, in file order, and the metadata of a file of `size` bytes."""
    entries = _from_json(header, path, "header")
    metadata = _texts(entries.pop("__metadata__", {}), path, "`__metadata__`")
    position = 8 + len(header)
    found = [_tensor_info(name, entry, position, path) for name, entry in entries.items()]
    found.sort(key=lambda info: (info.start, info.end))
    for info in found:
        if info.start != position:
            fault = "overlaps the one before it" if info.start < position else "follows a hole"
            raise _error(path, f"tensor {info.name!r} at byte {info.start} {fault}")
        position = info.end
    if position != size:
        fault = "is truncated" if position > size else "has bytes after its last tensor"
        raise _error(path, f"{fault}: tensors end at byte {position}, the file at byte {size}")
    return {info.name: info for info in found}, metadata


def _tensor_info(name: str, entry: Any, data_start: int, path: Path) -> TensorInfo:
    match entry:
        case {"dtype": str(tag), "shape": [*shape], "data_offsets": [start, end]}:
            pass
        case _:
            raise _error(path, f"tensor {name!r} lacks a dtype, a shape or a pair of offsets")
    if tag not in _DTYPES:
        remedy = f"Convert the tensor to one of {', '.join(_DTYPES)}."
        raise _error(path, f"tensor {name!r} has the unknown dtype {tag!r}", remedy)
    # `type is int`, because JSON's true would else pass for 1.
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, end)):
        raise _error(path, f"tensor {name!r} has a size or an offset that is not a count")
    dtype = _DTYPES[tag]
    # The second product: beside an axis of 0 any other passes the first, and overflows in torch.
    if (
        math.prod(shape) * dtype.itemsize != end - start
        or math.prod(max(n, 1) for n in shape) >= 2**63
    ):
        fault = f"{tag} of shape {shape} does not fill the bytes from {start} to {end}"
        raise _error(path, f"tensor {name!r}: {fault}")
    return TensorInfo(name, dtype, tuple(shape), data_start + start, data_start + end)


def _listed_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index says; empty when there is `model.safetensors` alone."""
    if not folder.is_dir():
        raise _error(folder, "no such folder", "Check the path.")
    index, single = folder / INDEX_FILE, folder / MODEL_FILE
    # lexists: a dangling link of a download cache is then reported as one, and not as nothing.
    if not os.path.lexists(index):
        if not os.path.lexists(single):
            raise _nothing_to_read(folder)
        return {}
    with _opened(index) as file:
        raw = file.read()
    _refuse_pointer(raw, index)
    names = _texts(_from_json(raw, index, "index").get("weight_map"), index, "`weight_map`")
    for name in sorted(set(names.values())):
        # Judged by its spelling, not resolved: in a download cache every file is a link outwards.
        spelled = PureWindowsPath(name)  # knows both separators, and drives
        if spelled.anchor or ".." in spelled.parts:
            remedy = "Correct the index: it names files of its own folder."
            raise _error(index, f"names {name!r}, which leads out of the folder", remedy)
        if not os.path.isfile(folder / name):
            raise _error(index, f"names {name!r}, which is not in the folder")
    files = {tensor: folder / name for tensor, name in names.items()}
    if not files or (os.path.lexists(single) and single not in files.values()):
        what = f"names no tensor, or leaves out {MODEL_FILE} beside it: which is the model?"
        raise _error(index, what, f"Remove the index, or remove {MODEL_FILE}.")
    return files


def _nothing_to_read(folder: Path) -> StoreError:
    save = "AutoModelForCausalLM.from_pretrained({}).save_pretrained(new_folder)."
    found = {path.suffix for path in folder.iterdir()}
    if ".safetensors" in found:
        what = f"has safetensors files, but neither {MODEL_FILE} nor {INDEX_FILE}"
        remedy = f"Rename a single file to {MODEL_FILE}, or fetch the index of several."
    elif found & {".bin", ".pt", ".pth", ".ckpt"}:
        what = "has pickled weights only, and a pickle can run any code when it is read"
        remedy = "Convert it once, if you trust its origin: " + save.format("folder")
    elif ".gguf" in found:
        what = "has GGUF weights only"
        remedy = "Better take the model that the GGUF was made of. Or convert it: "
        remedy += save.format("folder, gguf_file=name")
    else:
        what, remedy = "has no safetensors files", "Check the path, or download the weights."
    return _error(folder, what, remedy)


def _from_json(raw: bytes, path: Path, noun: str) -> dict[str, Any]:
    """A JSON object, read strictly: no key twice, no string that UTF-8 cannot write."""

    def strict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for text in (text for pair in pairs for text in pair if isinstance(text, str)):
            text.encode()  # a lone surrogate raises a ValueError
        plain = dict(pairs)
        if len(plain) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"the key {max(keys, key=keys.count)!r} stands twice")
        return plain

    try:
        value = json.loads(raw.decode(), object_pairs_hook=strict)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"has an invalid {noun}: {error}") from error
    if not isinstance(value, dict):
        raise _error(path, f"has an invalid {noun}: not a JSON object")
    return cast("dict[str, Any]", value)


def _texts(value: Any, path: Path, noun: str) -> dict[str, str]:
    plain = cast("dict[str, Any]", value)
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in plain.values()):
        raise _error(path, f"has no {noun} that maps strings to strings")
    return plain


def _to_json(value: Any, path: Path, **style: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **style).encode()
    except (TypeError, ValueError, RecursionError) as error:
        remedy = "Use strings, finite numbers, booleans, None, lists and dictionaries only."
        raise _error(path, f"cannot be written as JSON: {error}", remedy) from error


def _hash(tensor: Tensor, where: str) -> str:
    # JSON frames dtype and shape, which fix the number of bytes that follow.
    kind = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    digest = hashlib.sha256(json.dumps(kind).encode() + b"\n")
    digest.update(_memory(tensor, where))
    return digest.hexdigest()


def _memory(tensor: Tensor, where: str) -> memoryview:
    """The elements' bytes in order: in place if they lie so on the CPU, else of a copy."""
    # A wrapper subclass (a sharded tensor, say) has a null pointer too.
    if tensor.layout != torch.strided or (tensor.numel() and tensor.data_ptr() == 0):
        remedy = "Load a meta tensor, gather a sharded one, call `to_dense` on a sparse one."
        raise _error(where, f"has no memory to read ({tensor.layout}, {tensor.device})", remedy)
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # As bytes, because numpy knows neither bfloat16 nor float8. Strided by hand, because an axis of
    # length 1 keeps any stride, and with a stride of 2 one number is no bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


@contextmanager
def _opened(path: Path) -> Generator[BufferedReader, None, None]:
    if not os.path.isfile(path):
        remedy = "Check the path; a link without its file is a download that was cut off."
        raise _error(path, "no such file", remedy)
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        remedy = "Check its permissions and the disk."
        raise _error(path, f"cannot be read: {error.strerror or error}", remedy) from error


@contextmanager
def _replacing(path: Path) -> Generator[BufferedWriter, None, None]:
    """A file to write, which takes the name `path` only when all of it is on the disk."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # else a power cut can undo the renaming
        finally:
            os.close(folder)
    except OSError as error:
        remedy = "Check that the folder exists and is writable, and that the disk has room."
        raise _error(path, f"cannot be written: {error.strerror or error}", remedy) from error
    finally:
        with suppress(OSError):  # tidying up must not hide the reason
            partial.unlink(missing_ok=True)


def _stamp(file: BufferedReader) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_pointer(head: bytes, path: Path) -> None:
    if head.startswith(_LFS_POINTER):
        remedy = "Fetch the weights: run `git lfs pull` in the cloned folder."
        raise _error(path, "is a git-lfs pointer, not the file itself", remedy)


def _get(known: Mapping[str, _T], name: str, where: Path) -> _T:
    if name not in known:
        nearest = difflib.get_close_matches(name, known) or list(known)[:3] or ["none"]
        raise _error(where, f"has no tensor {name!r}", f"It has {', '.join(nearest)}.")
    return known[name]


def _error(where: Path | str, what: str, remedy: str = _DAMAGED) -> StoreError:
    return StoreError(what, where=str(where), remedy=remedy)
