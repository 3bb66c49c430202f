"""The door to job B: an artifact becomes a model that trains, and an artifact again.

In between stands any loop or Trainer:

    model = ongrid.load("smollm2-int4")
    ongrid.attach(model, ongrid.QaLora())
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, ongrid.QaLora()))
    ...
    proof = ongrid.merge(model, "smollm2-int4-tuned")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ongrid.errors import MergeMismatch, OngridError, StoreError, raise_all
from ongrid.export.verify import verify
from ongrid.store.artifact import CONFIG_FILE, Artifact, refuse_folder, side_files
from ongrid.store.shards import content_hash
from ongrid.tune.merge import MergeProof
from ongrid.tune.merge import merge as merge_in_place
from ongrid.tune.method import trained
from ongrid.tune.state import save_state

UNMERGED = ".unmerged.safetensors"
"""What the name of the unmerged state's file ends with; it lies beside the merged artifact."""


def load(folder: str | Path) -> nn.Module:
    """The model of a complete artifact, in evaluation mode: `attach` a method and train it."""
    from ongrid.hf.load import load_model

    return load_model(Artifact.open(Path(folder)).folder)


def merge(
    model: nn.Module,
    out: str | Path | None = None,
    *,
    source: str | Path | None = None,
    overwrite: bool = False,
) -> MergeProof:
    """Merges a tuned model in place, with a proof, and writes it as an artifact to `out`.

    What trained is saved first, to `OUT.unmerged.safetensors`, so that no check can lose it.
    `source` is the artifact that the model was loaded from, by default the one that its config
    names. What training changed outside of the quantized matrices (norms) is written and listed in
    the manifest. Law: served from `out`, each linear multiplies with the matrix, bit for bit, that
    it multiplied with in training; the bytes are read back and decoded by code of their own.

    Raises `MergeMismatch` where a matrix differs, and `StoreError` where `out` is taken, the source
    is missing, or a changed float parameter does not fit its stored dtype.
    """
    if out is None:
        return merge_in_place(model)
    folder, begun = Path(out), _source(model, source)
    same = folder.resolve() == begun.folder.resolve()
    raise_all(
        [
            *refuse_folder(folder, overwrite=overwrite),
            *[
                StoreError(
                    "this is the artifact that was tuned",
                    where=str(folder),
                    remedy="Choose another output folder.",
                )
            ]
            * same,
        ]
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    if trained(model):
        save_state(model, folder.with_name(folder.name + UNMERGED))
    changed = _changed(begun, model.state_dict())
    proof = merge_in_place(model)
    tuned = {"artifact": _content(begun), "parts": proof.codes, "changed": content_hash(changed)}
    manifest = replace(
        begun.manifest,
        fingerprint={**begun.manifest.fingerprint, "tuned": tuned},
        changed=sorted({*begun.manifest.changed, *changed}),
    )
    artifact = Artifact.begin(folder, manifest, overwrite=overwrite)
    if not artifact.complete:
        _write(artifact, begun, model.state_dict(), proof.used)
    shown = verify(folder, fresh_process=False)
    if not shown.ok:
        raise MergeMismatch(
            "what was written is not what was trained:\n" + "\n".join(shown.lines()),
            where=str(folder),
            remedy=f"The trained state is in {folder.name}{UNMERGED}. Check the disk, and merge "
            "again from there.",
        )
    return proof


def _source(model: nn.Module, source: str | Path | None) -> Artifact:
    name = source or getattr(getattr(model, "config", None), "_name_or_path", "")
    if not name:
        raise StoreError(
            "the artifact that this model was loaded from is not known", remedy="Give `source`."
        )
    return Artifact.open(Path(name))


def _changed(begun: Artifact, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float tensors that are not those of the source any more, in their stored dtypes."""
    stored = begun.tensors()
    changed: dict[str, Tensor] = {}
    problems: list[OngridError] = []
    for name, info in stored.infos.items():
        if "_quantizer." in name or name not in state:
            continue
        now = state[name].cpu()
        kept = now.to(info.dtype)
        if not bool((kept.to(now.dtype) == now).all()):
            problems.append(
                StoreError(
                    f"was trained in {now.dtype} and does not fit the {info.dtype} that it is "
                    "stored in",
                    where=name,
                    remedy="Train it in the model's own dtype, or not at all.",
                )
            )
        elif not bool((kept == stored.read(name)).all()):
            changed[name] = kept
    raise_all(problems)
    return changed


def _write(
    artifact: Artifact, begun: Artifact, state: Mapping[str, Tensor], used: Mapping[str, str]
) -> None:
    """The source's segments with the model's tensors; what the model lacks travels along."""
    stored = begun.tensors()
    for segment, record in begun.records().items():
        tensors = {
            name: state[name].to(info.dtype) if name in state else stored.read(name)
            for name, info in begun.infos(segment).items()
        }
        told: dict[str, Any] = {
            "notes": record.get("notes", {}),
            "used": {path: used[path] for path in record.get("used", {})},
        }
        artifact.write(segment, tensors, told)
    config = json.loads((begun.folder / CONFIG_FILE).read_bytes())
    artifact.finish(config, side_files(begun.folder))


def _content(artifact: Artifact) -> list[str]:
    """The hashes of an artifact's segments: what was tuned."""
    return [record["hash"] for record in artifact.records().values()]
