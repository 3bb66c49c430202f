"""The manifest of an artifact, and what it says of a run that wants to go on with it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ongrid._config import build
from ongrid.errors import ConfigError, OngridError, ResumeError, StoreError, raise_all

FORMAT_VERSION = 1
MANIFEST_FILE = "ongrid.json"

ACCEPTABLE = {
    "algorithm",
    "attention",
    "capability",
    "data",
    "devices",
    "ongrid",
    "threads",
    "torch",
    "transformers",
}
"""Fields in which a resumed run may differ if it says so.

Another source, config or recipe would make an artifact of two models.
"""


@dataclass(frozen=True)
class Manifest:
    """What an artifact was made from and how.

    `fingerprint`: everything that decides its bits, field by field. `matrices`: by linear path, its
    `grid`, `shape` [out, in], compute `dtype`, and whether the source stored it `transposed`.
    `activations`: by quantizer path, its `grid` and whether it is `dynamic`. `kept`: what stayed
    float, and why. `accepted`: what a resumed run was allowed to have in place of a field of the
    fingerprint, by field. `changed`: the tensors outside of quantizers that were trained.
    """

    fingerprint: dict[str, Any]
    recipe: dict[str, Any]
    algorithm: dict[str, Any]
    segments: list[str]
    matrices: dict[str, Any]
    activations: dict[str, Any]
    kept: dict[str, str]
    accepted: dict[str, list[Any]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    format_version: int = FORMAT_VERSION


def check_same_run(
    folder: Path, begun: Manifest, now: Manifest, accept: Collection[str]
) -> dict[str, list[Any]]:
    """What is accepted in place of which field; `ResumeError` naming all that may not differ.

    Raises `ConfigError` for a field in `accept` that can never differ.
    """
    unknown = sorted(set(accept) - ACCEPTABLE)
    if unknown:
        raise ConfigError(
            f"a resumed run cannot differ in {', '.join(unknown)}",
            where=str(folder),
            remedy=f"It may in: {', '.join(sorted(ACCEPTABLE))}.",
        )
    problems: list[OngridError] = []
    accepted = {name: list(values) for name, values in begun.accepted.items()}
    for name in sorted(begun.fingerprint.keys() | now.fingerprint.keys()):
        was, wanted = begun.fingerprint.get(name), now.fingerprint.get(name)
        if was == wanted or wanted in accepted.get(name, []):
            continue
        if name in accept:
            accepted.setdefault(name, []).append(wanted)
            continue
        ways = "Use what it was begun with, or a new output folder"
        allowed = f", or accept={name!r} (--accept {name})" if name in ACCEPTABLE else ""
        problems += [
            ResumeError(
                f"was begun with {part} {_show(before)}, now {_show(after)}",
                where=str(folder),
                remedy=f"{ways}{allowed}.",
            )
            for part, before, after in _differing(name, was, wanted)
        ]
    raise_all(problems)
    return accepted


def _differing(name: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """The innermost parts in which two JSON values differ, each with its path."""
    match before, now:
        case dict(), dict():
            parts = [(f".{key}", key) for key in sorted({**before, **now})]
            before_of, now_of = before.get, now.get
        case list(), list() if len(before) == len(now):
            parts = [(f"[{index}]", index) for index in range(len(now))]
            before_of, now_of = before.__getitem__, now.__getitem__
        case _:
            if before != now:
                yield name, before, now
            return
    for suffix, key in parts:
        yield from _differing(name + suffix, before_of(key), now_of(key))


def read_manifest(folder: Path) -> tuple[Manifest, bool]:
    """The manifest in a folder, and whether it says that the artifact is complete.

    Raises `StoreError` where there is none, or one that is damaged or of another version.
    """
    path = folder / MANIFEST_FILE
    try:
        plain = json.loads(path.read_bytes())
        complete = plain.pop("complete")
        plain.pop("content", None)
        version = plain.get("format_version")
        if version != FORMAT_VERSION:
            raise StoreError(
                f"format version {version}, this release reads {FORMAT_VERSION}",
                where=str(path),
                remedy="Read it with the release that wrote it.",
            )
        return build(Manifest, plain), bool(complete)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(
            "no artifact here (no ongrid.json)",
            where=str(folder),
            remedy="Give a folder that `ongrid quantize` wrote.",
        ) from None
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError, ConfigError) as error:
        raise StoreError(f"the manifest is damaged: {error}", where=str(path)) from None


def _show(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:197]}..."
