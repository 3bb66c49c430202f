"""What a new process computes from an artifact: `python -m ongrid.export.fresh FOLDER`.

Every matrix is loaded as a served model loads it: its stored tensors become the state of a
`CodedWeight`, whose `forward()` gives the matrix that the layer multiplies with. The last line
printed is JSON: by the path of the linear, the hash of that matrix. `verify` runs this module;
another one that keeps to this output may take its place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ongrid.grid import Grid
from ongrid.nn import WEIGHT, CodedWeight
from ongrid.store.artifact import Artifact
from ongrid.store.shards import tensor_hash


@torch.no_grad()
def forward_hashes(folder: Path) -> dict[str, str]:
    """By the path of the linear, the hash of the matrix `[out in]` that it would multiply with."""
    artifact = Artifact.open(folder)
    stored = artifact.tensors()
    names: dict[str, list[str]] = {}
    for name in stored.infos:
        names.setdefault(name.partition(f".{WEIGHT}.")[0], []).append(name)
    hashes = {}
    for path, entry in artifact.manifest.matrices.items():
        head = f"{path}.{WEIGHT}."
        state = {name.removeprefix(head): stored.read(name) for name in names.get(path, ())}
        rows, cols = entry["shape"]
        weight = CodedWeight.empty(
            Grid.parse(entry["grid"]),
            (rows, cols),
            getattr(torch, entry["dtype"]),
            ordered="order" in state,
        )
        weight.load_state_dict(state, assign=True)
        hashes[path] = tensor_hash(weight())
    return hashes


if __name__ == "__main__":
    print(json.dumps(forward_hashes(Path(sys.argv[1]))))
