"""Calibration data: whatever a caller has becomes a list of model calls."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ongrid.errors import CalibrationError
from ongrid.store.shards import tensor_hash

Batches = Iterable[Any] | Callable[[nn.Module], object]
"""Dictionaries of model arguments, tensors, or a function that runs a model over a set."""


@dataclass(frozen=True)
class ModelCall:
    """One call of the model: one batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, model: nn.Module) -> object:
        return model(*self.args, **self.kwargs)


def read_calls(model: nn.Module, batches: Batches) -> list[ModelCall]:
    """Every call that the batches stand for, caches switched off.

    A function is run once with the model's forward replaced by a note-taker; nothing is computed,
    so it cannot look at outputs. Rows that are padded on the left get the positions that generation
    would give them, where the model takes `position_ids`. Raises `CalibrationError` for an empty
    set or batch, for entries that are neither tensors nor dictionaries, and for what the model does
    not take. Tensors go to the device on which the model begins.
    """
    calls = _noted(model, batches) if callable(batches) else [_call(entry) for entry in batches]
    if not calls:
        raise CalibrationError(
            "the calibration set has no batch", remedy="Give at least one batch of token ids."
        )
    signature = inspect.signature(model.forward)
    for number, call in enumerate(calls):
        _check(call, signature, f"calibration batch {number}")
    device = device_of(model)
    if device is not None:
        calls = [_moved(call, device) for call in calls]
    return [ModelCall(call.args, _completed(call.kwargs, signature.parameters)) for call in calls]


def device_of(model: nn.Module) -> torch.device | None:
    """Where a model begins: the device of its first parameter with memory; None where none has."""
    return next((p.device for p in model.parameters() if not p.is_meta), None)


def _moved(call: ModelCall, device: torch.device) -> ModelCall:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return ModelCall(
        tuple(move(value) for value in call.args),
        {name: move(value) for name, value in call.kwargs.items()},
    )


def data_fingerprint(calls: list[ModelCall]) -> dict[str, Any]:
    """A hash of the batches, and their number and sizes for people to read."""
    sizes, hashes = [], hashlib.sha256()
    for call in calls:
        named = {str(i): v for i, v in enumerate(call.args)} | call.kwargs
        for name in sorted(named):
            value = named[name]
            shown = tensor_hash(value.cpu()) if isinstance(value, Tensor) else repr(value)
            hashes.update(f"{name}={shown};".encode())
        sizes.append(next((list(v.shape) for v in named.values() if isinstance(v, Tensor)), []))
    rows = sum(size[0] for size in sizes if size)
    return {"sha256": hashes.hexdigest(), "batches": len(calls), "rows": rows}


def _call(entry: Any) -> ModelCall:
    if isinstance(entry, Tensor):
        return ModelCall((entry,), {})
    if isinstance(entry, Mapping):
        return ModelCall((), dict(entry))
    raise CalibrationError(
        f"a calibration batch is a {type(entry).__name__}",
        remedy="Give tensors of token ids [rows tokens], or dictionaries of the model's arguments.",
    )


def _check(call: ModelCall, signature: inspect.Signature, where: str) -> None:
    try:
        ids = signature.bind_partial(*call.args, **call.kwargs).arguments.get("input_ids")
    except TypeError as error:
        raise CalibrationError(
            f"the model does not take these arguments: {error}",
            where=where,
            remedy="Give dictionaries of the model's arguments and nothing else.",
        ) from None
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        found = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise CalibrationError(
            f"input_ids are {found}, not integers [rows tokens]",
            where=where,
            remedy="Tokenize with return_tensors='pt', one row a text.",
        )
    if not ids.numel():
        raise CalibrationError(
            f"input_ids {tuple(ids.shape)} hold no token", where=where, remedy="Leave it out."
        )


def _noted(model: nn.Module, loop: Callable[[nn.Module], object]) -> list[ModelCall]:
    calls: list[ModelCall] = []

    def note(*args: Any, **kwargs: Any) -> None:
        calls.append(ModelCall(args, kwargs))

    before = model.__dict__.get("forward")
    model.forward = note
    try:
        loop(model)
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before
    return calls


def _completed(kwargs: dict[str, Any], accepted: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = {k: v for k, v in kwargs.items() if k != "labels"}
    if "use_cache" in accepted:
        kwargs["use_cache"] = False
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return kwargs
    left_padded = not bool(mask[:, 0].all())
    if left_padded and "position_ids" in accepted and "position_ids" not in kwargs:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return kwargs


def run_all(calls: list[ModelCall]) -> Callable[[nn.Module], None]:
    """A function that runs a model over calls, one after the other."""

    def drive(model: nn.Module) -> None:
        with torch.no_grad():
            for call in calls:
                call.run(model)

    return drive
