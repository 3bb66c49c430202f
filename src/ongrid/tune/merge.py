"""merge: a tuned model becomes integers again, with a proof that it is the model that was tuned.

No method is asked for: a weight's `freeze` gives what its `forward` computes. The proof does not
take that on trust. Each linear is run, in the mode of the moment (autocast, dtype, device); the
codes, scales and zeros that it decodes, and the matrix that its product really receives, are
compared with those of the stored bytes. Parts as well as numbers: a scale that is off by its last
digit may hide below the rounding to a narrower compute dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ongrid.errors import MergeMismatch, OngridError, raise_all
from ongrid.grid import QTensor, ops
from ongrid.nn import CodedWeight, QuantLinear, eval_mode
from ongrid.store.shards import content_hash, tensor_hash
from ongrid.tune.method import quantized

_DECODE = getattr(torch.ops, ops.NAMESPACE).decode.default


@dataclass(frozen=True)
class MergeProof:
    """What a merge has shown: of `matrices` matrices with `elements` numbers, `differing` differ.

    `codes`: a hash of all stored codes, scales and zeros. `used`: by path, the hash of the matrix
    that the linear multiplied with in training, as artifacts record it.
    """

    matrices: int
    elements: int
    differing: int
    codes: str
    used: dict[str, str]


@torch.no_grad()
def merge(model: nn.Module) -> MergeProof:
    """Fixes codes, scales and zeros of every quantized matrix, in place, and proves it.

    Law: each linear multiplies afterwards, bit for bit, with the matrix that it multiplied with
    before; nothing leaves the integers. Merging a merged model proves it again and changes nothing.
    Raises `StructureError` where nothing is quantized, and `MergeMismatch` for every matrix that
    differs; the model is then as it was.
    """
    merged, proof = _merged(model)
    linears = quantized(model)
    for path, weight in merged.items():
        linears[path].weight_quantizer = weight
    return proof


@torch.no_grad()
def prove(model: nn.Module) -> MergeProof:
    """The proof that `merge` would give, and its errors; the model is not changed and trains on."""
    return _merged(model)[1]


def _merged(model: nn.Module) -> tuple[dict[str, CodedWeight], MergeProof]:
    """By path, the weights of the merged model, and the proof that they are those of this one."""
    merged: dict[str, CodedWeight] = {}
    used: dict[str, str] = {}
    problems: list[OngridError] = []
    with eval_mode(model):
        for path, linear in quantized(model).items():
            weight = linear.weight_quantizer
            seen = _run(linear)
            tensors = weight.freeze().tensors()
            q = QTensor.from_tensors(weight.grid, weight.shape, tensors)
            stored = q.dequantize(weight.dtype)
            used[path] = tensor_hash(stored)
            merged[path] = CodedWeight(q, weight.dtype)
            wrong = _wrong(seen, q, stored)
            if wrong:
                problems.append(
                    MergeMismatch(
                        f"{wrong} are not those that the layer multiplied with",
                        where=path,
                        remedy="Nothing was merged, and nothing trained is lost. This is a fault "
                        "of ongrid: please report it with the grid.",
                    )
                )
    raise_all(problems)
    parts: dict[str, Tensor] = {}
    for path, weight in merged.items():
        parts |= weight.state_dict(prefix=f"{path}.")
    proof = MergeProof(
        matrices=len(merged),
        elements=sum(math.prod(weight.shape) for weight in merged.values()),
        differing=0,
        codes=content_hash(parts),
        used=used,
    )
    return merged, proof


@dataclass
class _Seen:
    """What a linear was seen to use: what it decoded, and the matrix that its product was given."""

    codes: Tensor | None = None
    scale: Tensor | None = None
    zero: Tensor | None = None
    matrix: Tensor | None = None


class _Decoded(TorchDispatchMode):
    """Keeps the arguments of the last decoding, the one of the matrix itself."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DECODE:
            self.seen.codes, self.seen.scale, self.seen.zero = args[:3]
        return func(*args, **(kwargs or {}))


class _Multiplied(TorchFunctionMode):
    """Keeps the matrix of the last linear product."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.linear:
            self.seen.matrix = args[1]
        return func(*args, **(kwargs or {}))


def _run(linear: QuantLinear) -> _Seen:
    weight = linear.weight_quantizer
    device = next((t.device for t in weight.state_dict().values()), None)
    x = torch.zeros(1, linear.in_features, dtype=weight.dtype, device=device)
    seen = _Seen()
    with _Multiplied(seen), _Decoded(seen):
        linear(x)
    return seen


def _wrong(seen: _Seen, q: QTensor, stored: Tensor) -> str:
    """How many codes, scales, zeros and numbers were seen that are not stored; empty for none."""
    pairs = {
        "codes": (seen.codes, q.codes.float()),
        "scales": (seen.scale, q.grid.scales(q.parts.scale)),
        "zeros": (seen.zero, None if q.parts.zero is None else q.parts.zero.float()),
        "numbers": (seen.matrix, stored),
    }
    counts = {noun: _differing(used, kept) for noun, (used, kept) in pairs.items()}
    return ", ".join(f"{count} {noun}" for noun, count in counts.items() if count)


def _differing(used: Tensor | None, stored: Tensor | None) -> int:
    """Numbers with other bits: a zero's sign counts, and a NaN equals itself."""
    if used is None or stored is None:
        return sum(t.numel() for t in (used, stored) if t is not None)
    # Codes and zeros are the same numbers in another dtype while they train; a matrix is cast once
    # more under autocast, as any weight is.
    wide = used.dtype if used.is_floating_point() else torch.float32
    a, b = used.to(wide).contiguous(), stored.to(wide).contiguous()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.view(kind) != b.view(kind)).sum())
