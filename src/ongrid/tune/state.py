"""The unmerged state: what trains, in a file of its own, so that training can go on later.

Adapters, fp32 masters and whatever else requires a gradient; the codes stay in the artifact that
they belong to, so that several adapters can live on one. The file names the codes by their hash.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from ongrid.errors import OngridError, StoreError, raise_all
from ongrid.nn import CodedWeight, quant_linears
from ongrid.store.shards import ShardFile, content_hash, write_shard
from ongrid.tune.method import trained

_KEY = "ongrid_state"


def save_state(model: nn.Module, file: str | Path) -> None:
    """Writes every parameter that requires a gradient, whole or not at all.

    Law: `load_state` into the same artifact with the same method attached gives, bit for bit, the
    same model. `StoreError` where nothing trains or the disk refuses.
    """
    names = trained(model)
    if not names:
        raise StoreError("nothing in this model trains", where=str(file), remedy="Call `attach`.")
    tensors = {name: model.get_parameter(name).detach() for name in names}
    write_shard(Path(file), tensors, {_KEY: json.dumps({"codes": _codes(model)})})


@torch.no_grad()
def load_state(model: nn.Module, file: str | Path) -> None:
    """Reads what `save_state` wrote into a model with the same method attached.

    `StoreError` for a state of other codes, and for every parameter that is missing, surplus or
    has another shape or dtype, all of them together; nothing is changed then.
    """
    stored = ShardFile(Path(file))
    try:
        codes = json.loads(stored.metadata[_KEY])["codes"]
    except (KeyError, TypeError, json.JSONDecodeError):
        raise StoreError("no state of a tuned model", where=str(file)) from None
    problems: list[OngridError] = []
    if codes != _codes(model):
        remedy = "Load the artifact that it was trained on."
        problems.append(
            StoreError(
                "it was trained on other codes than this model's", where=str(file), remedy=remedy
            )
        )
    here = {name: model.get_parameter(name) for name in trained(model)}
    for name in sorted(here.keys() | stored.infos.keys()):
        info, parameter = stored.infos.get(name), here.get(name)
        found = None if info is None else (info.shape, info.dtype)
        needed = None if parameter is None else (tuple(parameter.shape), parameter.dtype)
        if found != needed:
            problems.append(
                StoreError(
                    f"the file has {found or 'no such tensor'}, the model trains "
                    f"{needed or 'no such parameter'}",
                    where=f"{file}, {name}",
                    remedy="Attach the same method, with the same settings.",
                )
            )
    raise_all(problems)
    for name, parameter in here.items():
        parameter.copy_(stored.read(name))


def _codes(model: nn.Module) -> str:
    """A hash of the packed codes of every matrix."""
    return content_hash(
        {
            path: linear.weight_quantizer.get_buffer("codes")
            for path, linear in quant_linears(model).items()
            if isinstance(linear.weight_quantizer, CodedWeight)
        }
    )
