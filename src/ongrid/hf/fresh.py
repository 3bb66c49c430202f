"""Run as `python -m ongrid.hf.fresh DIR`: loads an artifact through transformers and hashes its
weights.

The third witness of `ongrid verify`: a process that has seen nothing of the run prints, as JSON,
the hash of the matrix that each linear of the loaded model multiplies with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ongrid.hf.load import load_model
from ongrid.nn import quant_linears
from ongrid.store.shards import tensor_hash


def main(folder: str) -> None:
    """Prints `{path: hash}` for every quantized linear of the model in a folder."""
    model = load_model(Path(folder))
    with torch.no_grad():
        hashes = {path: tensor_hash(linear.weight) for path, linear in quant_linears(model).items()}
    json.dump(hashes, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
