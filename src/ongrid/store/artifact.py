"""Artifact: a directory that is a run's checkpoint, its model, and what an export reads.

    ongrid.json                    what was asked for, of what, and whether it is complete
    model-<segment>.safetensors    one file a segment: layer-00000, layer-00001, ..., rest
    .resume/                       inputs of the layer that comes next, while a run is unfinished
    model.safetensors.index.json   written at the end, with the side files of the source,
    config.json                    and last of all this

A segment is done when its file has been renamed into place and its content hash holds; nothing
lists what is done. `config.json` comes last, so no loader takes half an artifact for a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ongrid.errors import OngridError, StoreError, raise_all
from ongrid.grid import Grid, QTensor
from ongrid.store.manifest import MANIFEST_FILE, Manifest, check_same_run, read_manifest
from ongrid.store.shards import (
    INDEX_FILE,
    ShardFile,
    ShardFolder,
    TensorInfo,
    content_hash,
    remove_partials,
    write_bytes,
    write_json,
    write_shard,
)

CONFIG_FILE = "config.json"
RESUME_FOLDER = ".resume"
REST = "rest"
_MODEL_FILES = {MANIFEST_FILE, CONFIG_FILE, INDEX_FILE, RESUME_FOLDER}


def layer_segment(index: int) -> str:
    """The name of a decoder layer's segment."""
    return f"layer-{index:05d}"


class Artifact:
    """An artifact on disk, being written or complete. Make one with `begin` or `open`."""

    def __init__(self, folder: Path, manifest: Manifest, *, complete: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self.complete = complete
        # Stands in every file of a run, so that a file of another run is never taken for its own.
        self._run = hashlib.sha256(
            json.dumps(manifest.fingerprint, sort_keys=True).encode()
        ).hexdigest()

    # ---- beginning, resuming, opening ------------------------------------------------------------

    @staticmethod
    def begin(
        folder: Path, manifest: Manifest, *, overwrite: bool = False, accept: Collection[str] = ()
    ) -> Artifact:
        """A new artifact, or the one that an equal run has begun or completed there.

        Raises `StoreError` where the folder cannot be written or holds other things, `ResumeError`
        naming every field in which the run that began it differs; `accept` names fields that may.
        `overwrite` empties the folder first, unless an equal run has begun there: that goes on. A
        complete artifact that was damaged since is begun again where the damage is.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_partials(folder)
            if overwrite and not _goes_on(folder, manifest):
                _empty(folder)
            if is_artifact(folder):
                return _resumed(folder, manifest, accept)
            return _started(folder, manifest)
        except OSError as error:
            raise StoreError(
                f"cannot be written: {error.strerror or error}",
                where=str(folder),
                remedy="Choose another output folder.",
            ) from None

    @staticmethod
    def open(folder: Path) -> Artifact:
        """A complete artifact; `StoreError` for anything else."""
        manifest, complete = read_manifest(folder)
        if not complete or not (folder / CONFIG_FILE).is_file():
            raise StoreError(
                "this artifact is not complete",
                where=str(folder),
                remedy="Run the same command again: it goes on where it stopped.",
            )
        return Artifact(folder, manifest, complete=True)

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, segment: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Puts a segment into place, whole or not at all; `record` is JSON kept in its header."""
        self._put(self._file(segment), tensors, {"segment": segment, **record})

    def record(self, segment: str) -> dict[str, Any] | None:
        """What was recorded with a segment, or None unless it lies there undamaged."""
        return self._verified(self._file(segment))

    def read(self, segment: str) -> dict[str, Tensor]:
        """The tensors of a segment that is done."""
        return _tensors(self._file(segment))

    def infos(self, segment: str) -> Mapping[str, TensorInfo]:
        """What tensors a segment that is done holds, from its header alone."""
        return ShardFile(self._file(segment)).infos

    def keep_inputs(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Keeps the inputs of a layer for a later run."""
        self.scratch()
        self._put(self._inputs_file(index), tensors, {"index": index})

    def drop_inputs(self, index: int) -> None:
        """Forgets the inputs of a layer that is done."""
        self._inputs_file(index).unlink(missing_ok=True)

    def inputs(self, index: int) -> Mapping[str, Tensor] | None:
        """The kept inputs of a layer, or None unless they lie there undamaged; each is read when
        asked for.
        """
        if self._verified(self._inputs_file(index)) is None:
            return None
        return ShardFile(self._inputs_file(index))

    def scratch(self) -> Path:
        """A folder for what an unfinished run needs; `finish` removes it."""
        folder = self.folder / RESUME_FOLDER
        folder.mkdir(exist_ok=True)
        return folder

    def finish(self, config: Mapping[str, Any], side_files: Sequence[Path]) -> None:
        """Completes the artifact: side files byte for byte, index, manifest, config last."""
        for path in side_files:
            write_bytes(self.folder / path.name, path.read_bytes())
        weight_map, size, hashes = {}, 0, {}
        changed = set(self.manifest.changed)
        for segment in self.manifest.segments:
            file = ShardFile(self._file(segment))
            record = json.loads(file.metadata["ongrid"])
            hashes[file.path.name] = record["hash"]
            changed.update(record.get("changed", []))
            for name, info in file.infos.items():
                weight_map[name] = file.path.name
                size += info.nbytes
        write_json(
            self.folder / INDEX_FILE,
            {"metadata": {"total_size": size}, "weight_map": weight_map},
        )
        shutil.rmtree(self.folder / RESUME_FOLDER, ignore_errors=True)
        self.manifest = replace(self.manifest, changed=sorted(changed))
        self._declare(complete=True, content=hashes)
        write_json(self.folder / CONFIG_FILE, config)

    # ---- reading ---------------------------------------------------------------------------------

    def tensors(self) -> ShardFolder:
        """All tensors of a complete artifact, as they are stored."""
        return ShardFolder(self.folder)

    def stream(self) -> Iterator[tuple[str, QTensor]]:
        """The quantized matrices one by one, by the path of their linear."""
        stored = self.tensors()
        for path in self.manifest.matrices:
            yield path, self.matrix(path, stored)

    def matrix(self, path: str, stored: ShardFolder | None = None) -> QTensor:
        """One quantized matrix."""
        stored = stored or self.tensors()
        entry = self.manifest.matrices[path]
        head = f"{path}.weight_quantizer."
        found = {
            name.removeprefix(head): stored.read(name)
            for name in stored.infos
            if name.startswith(head)
        }
        rows, cols = entry["shape"]
        try:
            return QTensor.from_tensors(Grid.parse(entry["grid"]), (rows, cols), found)
        except OngridError as error:
            raise error.at(f"{self.folder}, {path}") from None

    def damage(self) -> list[StoreError]:
        """What does not hold of a complete artifact: every segment against its recorded hash."""
        listed = json.loads((self.folder / MANIFEST_FILE).read_bytes()).get("content", {})
        problems = []
        for segment in self.manifest.segments:
            file = self._file(segment)
            record = self.record(segment)
            if record is None or record["hash"] != listed.get(file.name):
                problems.append(
                    StoreError(
                        "the content does not match its recorded hash",
                        where=str(file),
                        remedy="Quantize into this folder again, or fetch the file again.",
                    )
                )
        return problems

    def records(self) -> dict[str, dict[str, Any]]:
        """What was recorded with each segment."""
        found = {}
        for segment in self.manifest.segments:
            file = ShardFile(self._file(segment))
            found[segment] = json.loads(file.metadata["ongrid"])
        return found

    def _declare(self, *, complete: bool, **more: Any) -> None:
        """Writes the manifest."""
        plain = {**asdict(self.manifest), "complete": complete, **more}
        write_json(self.folder / MANIFEST_FILE, plain)
        self.complete = complete

    def _reopen(self) -> None:
        """Makes this an unfinished artifact; the config goes, so that no loader takes it."""
        (self.folder / CONFIG_FILE).unlink(missing_ok=True)
        self._declare(complete=False)

    def _put(self, path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        header = {"hash": content_hash(tensors), "run": self._run, **record}
        text = json.dumps(header, sort_keys=True, allow_nan=False)
        write_shard(path, tensors, {"format": "pt", "ongrid": text})

    def _verified(self, path: Path) -> dict[str, Any] | None:
        """The record in a file's header, if the file is of this run and holds what it names."""
        try:
            file = ShardFile(path)
            record = json.loads(file.metadata["ongrid"])
            known = isinstance(record, dict) and record["run"] == self._run
            held = content_hash(file) if known else None
        except (StoreError, KeyError, json.JSONDecodeError):
            return None
        return record if known and record.get("hash") == held else None

    def _file(self, segment: str) -> Path:
        return self.folder / f"model-{segment}.safetensors"

    def _inputs_file(self, index: int) -> Path:
        return self.folder / RESUME_FOLDER / f"inputs-{index:05d}.safetensors"


def is_artifact(folder: Path) -> bool:
    """Whether a folder holds an artifact, complete or not."""
    return (folder / MANIFEST_FILE).is_file()


def side_files(folder: Path) -> list[Path]:
    """The files of a model folder that travel along: all but weights, the index and the config."""
    weights = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in weights
        and not path.name.endswith(".index.json")
        and path.name not in (CONFIG_FILE, MANIFEST_FILE)
    ]


def refuse_folder(folder: Path, *, overwrite: bool) -> list[StoreError]:
    """Why an artifact cannot be begun in a folder, as far as can be told without writing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [
            StoreError(
                f"cannot be written: {existing} is not a writable folder",
                where=str(folder),
                remedy="Choose another output folder.",
            )
        ]
    if existing != folder or is_artifact(folder):
        return []
    return _not_a_models(folder) if overwrite else _strangers(folder)


def _names(folder: Path) -> list[str]:
    """What lies in a folder, but for what a killed run left half written."""
    names = (path.name for path in folder.iterdir())
    return sorted(n for n in names if not (n.startswith(".") and n.endswith(".partial")))


def _strangers(folder: Path) -> list[StoreError]:
    names = _names(folder)
    if not names:
        return []
    return [
        StoreError(
            f"the output folder is not empty: {', '.join(names[:5])}",
            where=str(folder),
            remedy="Choose another one, or pass overwrite=True (--overwrite) to empty it.",
        )
    ]


def _not_a_models(folder: Path) -> list[StoreError]:
    """Why a folder is not emptied: it is not like a model's, or holds more than one would."""
    names = _names(folder)
    folders = [p.name for p in folder.iterdir() if p.is_dir() and p.name != RESUME_FOLDER]
    like = any(n in _MODEL_FILES or n.endswith(".safetensors") for n in names)
    if folders:
        what = f"holds folders, which overwriting would not touch: {', '.join(sorted(folders)[:5])}"
    elif names and not like:
        what = f"not emptied, since it is no model's folder: {', '.join(names[:5])}"
    else:
        return []
    remedy = "Choose another output folder, or clear this one by hand."
    return [StoreError(what, where=str(folder), remedy=remedy)]


def _empty(folder: Path) -> None:
    raise_all(_not_a_models(folder))
    shutil.rmtree(folder / RESUME_FOLDER, ignore_errors=True)
    # The config goes first, so that a kill in between leaves nothing that a loader would take; the
    # manifest goes last, so that it leaves something that the next run may go on emptying.
    rank = {CONFIG_FILE: 0, MANIFEST_FILE: 2}
    for path in sorted(folder.iterdir(), key=lambda p: rank.get(p.name, 1)):
        path.unlink()


def _started(folder: Path, manifest: Manifest) -> Artifact:
    raise_all(_strangers(folder))
    artifact = Artifact(folder, manifest, complete=False)
    artifact._declare(complete=False)
    return artifact


def _goes_on(folder: Path, manifest: Manifest) -> bool:
    """Whether a folder holds an artifact of an equal run."""
    try:
        check_same_run(folder, read_manifest(folder)[0], manifest, ())
    except OngridError:
        return False
    return True


def _resumed(folder: Path, manifest: Manifest, accept: Collection[str]) -> Artifact:
    begun, complete = read_manifest(folder)
    accepted = check_same_run(folder, begun, manifest, accept)
    complete = complete and (folder / CONFIG_FILE).is_file()
    artifact = Artifact(folder, replace(begun, accepted=accepted), complete=complete)
    if (complete and artifact.damage()) or (not complete and accepted != begun.accepted):
        artifact._reopen()
    return artifact


def _tensors(path: Path) -> dict[str, Tensor]:
    return dict(ShardFile(path))


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
