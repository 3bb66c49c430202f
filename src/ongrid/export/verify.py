"""verify: the proof that an artifact's files hold what its layers multiplied with.

    used      the matrix that a layer multiplied with when the walk went on, hashed at that time
    library   the files, decoded by `QTensor.dequantize`
    fresh     the files, loaded and computed with by a process that knows nothing but the folder
    file      the files' bytes, decoded by the referee

Each of the first three must equal the last, bit for bit, for every matrix. Beside that every
segment must have its recorded content, and manifest, index and headers must speak of the same
tensors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ongrid.errors import OngridError, StoreError, VerifyError
from ongrid.export.referee import Decoded, Referee
from ongrid.nn import WEIGHT
from ongrid.store.artifact import MANIFEST_FILE, Artifact
from ongrid.store.shards import ShardFolder

FRESH_MODULE = "ongrid.export.fresh"
_CHANGED = "It was changed after it was written: quantize again, or fetch the artifact again."
_FAULT = "This is a fault of ongrid, not of the artifact: please report the grid and the shape."


@dataclass(frozen=True)
class Claim:
    """One claim of a proof: of how many things it was tried, and of how many it holds."""

    text: str
    held: int
    total: int


@dataclass(frozen=True)
class Verification:
    """What was tried and what was found; `ok` if every claim holds of everything.

    Counts of matrices for which the named bits equal the referee's; `fresh_equals_file` is None
    where no process was asked for. Each failure names a matrix or a file.
    """

    folder: Path
    segments: int
    damaged: int
    matrices: int
    used_equals_file: int
    library_equals_file: int
    fresh_equals_file: int | None
    failures: tuple[VerifyError, ...]

    @property
    def ok(self) -> bool:
        return not self.failures and all(c.held == c.total for c in self.table())

    def table(self) -> list[Claim]:
        """The claims, one by one."""
        whole = self.segments - self.damaged
        claims = [
            Claim("segments have their recorded content", whole, self.segments),
            Claim("matrices: used by the layer == file", self.used_equals_file, self.matrices),
            Claim("matrices: decoded by ongrid == file", self.library_equals_file, self.matrices),
        ]
        if self.fresh_equals_file is not None:
            text = "matrices: loaded by a fresh process == file"
            claims.append(Claim(text, self.fresh_equals_file, self.matrices))
        return claims

    def lines(self) -> list[str]:
        """The table as text, then the failures."""
        claims = self.table()
        width = max(len(c.text) for c in claims)
        found = [f"{c.text:{width}}  {c.held} of {c.total}" for c in claims]
        return found + [f"FAILED {failure}" for failure in self.failures]


def verify(
    folder: Path, *, fresh_process: bool = True, fresh_module: str = FRESH_MODULE
) -> Verification:
    """Proves that a complete artifact holds, bit for bit, what its layers multiplied with.

    `fresh_module` is what the fresh process runs, with the folder as its argument; the last line
    that it prints is JSON: by the path of the linear, the `tensor_hash` of the matrix `[out in]`
    that it computes with. Law: what is wrong with a file or a matrix becomes a failure that names
    it, and the rest is still tried. `StoreError` where there is no complete artifact to prove
    anything of. Reads every shard; holds one matrix at a time.
    """
    artifact = Artifact.open(Path(folder))
    trial = _Trial(artifact)
    damaged = trial.content()
    stored = trial.structure(damaged == 0)
    trial.decode(stored)
    fresh = None
    if fresh_process:
        # Where the library cannot open the folder, another process of it cannot either.
        fresh = 0 if stored is None else trial.run(fresh_module)
    return Verification(
        folder=artifact.folder,
        segments=len(artifact.manifest.segments),
        damaged=damaged,
        matrices=len(artifact.manifest.matrices),
        used_equals_file=trial.used,
        library_equals_file=trial.library,
        fresh_equals_file=fresh,
        failures=tuple(trial.failures),
    )


class _Trial:
    """The proof under way: what failed, and how many matrices agree with the referee so far."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.failures: list[VerifyError] = []
        self.hashes: dict[str, str] = {}  # the referee's, by path
        self.used = 0
        self.library = 0

    def fail(self, what: str, where: Path | str, remedy: str = _CHANGED) -> None:
        self.failures.append(VerifyError(what, where=str(where), remedy=remedy))

    def fail_with(self, error: OngridError, where: Path | str = "") -> None:
        located = error.at(str(where))
        self.fail(located.what, located.where, located.remedy)

    # ---- the files ------------------------------------------------------------------------------

    def content(self) -> int:
        """How many segments do not have their recorded content."""
        damage = self.artifact.damage()
        for problem in damage:
            self.fail_with(problem)
        return len(damage)

    def structure(self, undamaged: bool) -> ShardFolder | None:
        """Whether manifest, index, headers and folder agree; the tensors, if they can be read."""
        folder, manifest = self.artifact.folder, self.artifact.manifest
        if undamaged:  # else the records cannot all be read
            self._records()
        try:
            stored = self.artifact.tensors()
        except StoreError as error:
            self.fail_with(error)
            return None
        listed = set(json.loads((folder / MANIFEST_FILE).read_bytes()).get("content", {}))
        indexed = {file.name for file in stored.files}
        for name in sorted({file.name for file in folder.glob("*.safetensors")} | listed | indexed):
            for names, what in ((listed, MANIFEST_FILE), (indexed, "the index")):
                if name not in names:
                    self.fail(f"{what} does not list this file", folder / name)
        held = {name.partition(f".{WEIGHT}.")[0] for name in stored.infos if f".{WEIGHT}." in name}
        for path in sorted(held - manifest.matrices.keys()):
            self.fail("the files hold this matrix, the manifest does not list it", path)
        for path in sorted(manifest.matrices.keys() & held):
            if f"{path}.weight" in stored.infos:
                self.fail("the files hold this matrix as floats too: which one is served?", path)
        for path, entry in manifest.activations.items():
            if not _table(entry).get("dynamic") and f"{path}.scale" not in stored.infos:
                self.fail("this static quantizer has no stored range", path)
        return stored

    def _records(self) -> None:
        for segment, record in self.artifact.records().items():
            if record.get("segment") != segment:
                self.fail(f"this is the segment {record.get('segment')!r}, renamed", segment)
            for path in sorted(_table(record.get("used")).keys() - self.artifact.manifest.matrices):
                self.fail("a layer used this matrix, the manifest does not list it", path)

    # ---- the matrices ---------------------------------------------------------------------------

    def decode(self, stored: ShardFolder | None) -> None:
        """Compares the referee's matrices with what was recorded, and with the library's."""
        try:
            referee = Referee(self.artifact.folder)
        except OngridError as error:
            self.fail_with(error)
            return
        for path in self.artifact.manifest.matrices:
            try:
                found, recorded = referee.decode(path), referee.recorded(path)
            except OngridError as error:
                self.fail_with(error, path)
                continue
            self.hashes[path] = found.hash
            self.used += self._was_used(path, found, recorded)
            if stored is not None:
                self.library += self._library_agrees(path, found, stored)

    def _was_used(self, path: str, found: Decoded, recorded: str | None) -> bool:
        if recorded is None:
            self.fail("nothing records which matrix this layer multiplied with", path)
        elif recorded != found.hash:
            what = "the layer multiplied with another matrix than the file holds"
            self.fail(f"{what}: {recorded[:12]} then, {found.hash[:12]} now", path)
        return recorded == found.hash

    def _library_agrees(self, path: str, found: Decoded, stored: ShardFolder) -> bool:
        try:
            q = self.artifact.matrix(path, stored)
        except OngridError as error:
            self.fail_with(error, path)
            return False
        w = q.dequantize(getattr(torch, found.dtype))
        bits = w.view(torch.uint8).numpy().view(found.bits.dtype)
        wrong = np.argwhere(bits != found.bits)
        if len(wrong):
            what = f"ongrid decodes {len(wrong)} of {bits.size} numbers of {q.grid} {list(q.shape)}"
            self.fail(f"{what} unlike the referee, the first at {wrong[0].tolist()}", path, _FAULT)
        return not len(wrong)

    # ---- the fresh process ----------------------------------------------------------------------

    def run(self, module: str) -> int:
        """How many matrices a fresh process computes with as the referee decodes them."""
        try:
            computed = _fresh_hashes(module, self.artifact.folder)
        except VerifyError as error:
            self.fail_with(error)
            return 0
        for path in sorted(computed.keys() - self.artifact.manifest.matrices.keys()):
            self.fail("a fresh process loads this matrix, the manifest does not list it", path)
        for path, of_file in self.hashes.items():
            if path not in computed:
                self.fail("a fresh process does not load this matrix", path)
            elif computed[path] != of_file:
                what = "a fresh process computes with another matrix than the file holds"
                self.fail(f"{what}: {computed[path][:12]}, {of_file[:12]}", path, _FAULT)
        return sum(computed.get(path) == of_file for path, of_file in self.hashes.items())


def _fresh_hashes(module: str, folder: Path) -> dict[str, str]:
    """What `python -m module folder` prints last."""
    # -P: code that lies in the current folder is not part of the interpreter.
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, str(folder.absolute())],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise VerifyError(
            f"a fresh process (-m {module}) failed with exit code {done.returncode}: "
            f"{_last_words(done.stderr)}",
            where=str(folder),
        )
    try:
        computed = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        computed = None
    if not isinstance(computed, dict) or not all(isinstance(h, str) for h in computed.values()):
        raise VerifyError(
            f"a fresh process (-m {module}) printed no table of hashes: {done.stdout[-200:]!r}",
            where=str(folder),
        )
    return computed


def _last_words(stderr: str) -> str:
    """The error at the end of a traceback, with the indented lines of its own message."""
    lines = stderr.strip().splitlines() or ["no message"]
    start = max((i for i, line in enumerate(lines) if not line.startswith(" ")), default=0)
    return "\n".join(lines[start:])


def _table(plain: Any) -> dict[str, Any]:
    return plain if isinstance(plain, dict) else {}
