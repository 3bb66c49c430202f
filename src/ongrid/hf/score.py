"""Perplexity, and distance to a reference: several models on the same tokens, side by side.

On a window of T tokens the positions 1 .. T-1 are predicted, from the logits at 0 .. T-2. With
`p = log_softmax(logits)` in fp32 of a model, and `r` of the reference, over all N positions:

    perplexity = exp( -1/N  sum  p[next token] )
    kl         =      1/N  sum  sum_v exp(r[v]) (r[v] - p[v])        in nats
    top1       =      1/N  sum  ( argmax p == argmax r )

Sums over positions are fp64. A batch goes through the reference once and through every model, and
then is forgotten: neither the texts nor the vocabularies ever have to fit into memory whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ongrid.errors import CalibrationError, NonFiniteError, StructureError
from ongrid.nn import eval_mode

_CHUNK_BYTES = 32 << 20  # of fp32 logits that are turned into probabilities at once


@dataclass(frozen=True)
class Score:
    """`perplexity`, and per token the `kl` to a reference in nats and the `top1` agreement with it.

    `tokens` were predicted. Without a reference `kl` and `top1` are None.
    """

    perplexity: float
    kl: float | None
    top1: float | None
    tokens: int


def score(
    model: nn.Module,
    windows: Int[Tensor, "rows seqlen"],
    *,
    against: nn.Module | None = None,
    rows_per_forward: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """The score of one model on `windows`; arguments and errors are those of `score_all`."""
    return score_all(
        {"model": model},
        windows,
        against=against,
        rows_per_forward=rows_per_forward,
        progress=progress,
    )["model"]


def score_all(
    models: Mapping[str, nn.Module],
    windows: Int[Tensor, "rows seqlen"],
    *,
    against: nn.Module | None = None,
    rows_per_forward: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Score]:
    """The score of each causal language model on the same `windows` of token ids, int64.

    `against` is the reference of `kl` and `top1`; its forward runs once per batch, also when it is
    one of `models`. A model is called as `model(input_ids=..., use_cache=False).logits`, on its own
    device, in eval mode, and is left in the mode that it came in. `progress(done, rows)` is called
    after each batch of `rows_per_forward` windows. Kernels round differently at other batch sizes
    (a bf16 model by 1e-3 of its perplexity), so compare scores of one `rows_per_forward`.

    Raises `NonFiniteError` with the model and the window for a logit that is not finite,
    `StructureError` for a vocabulary that is not the reference's, and `CalibrationError` for
    windows in which nothing is predicted.
    """
    rows, seqlen = windows.shape
    if rows < 1 or seqlen < 2 or rows_per_forward < 1:
        raise CalibrationError(
            f"nothing to predict in windows {list(windows.shape)}, {rows_per_forward} per forward",
            remedy="Give at least one window of two tokens.",
        )
    totals = {name: _Totals() for name in models}
    with torch.inference_mode(), eval_mode(*models.values(), *([against] if against else [])):
        for first in range(0, rows, rows_per_forward):
            batch = windows[first : first + rows_per_forward]
            reference = None if against is None else _logits(against, batch)
            for name, model in models.items():
                logits = reference if model is against else _logits(model, batch)
                assert logits is not None  # `model is against` only where there is a reference
                if reference is not None and logits.shape != reference.shape:
                    raise StructureError(
                        f"{logits.shape[-1]} logits per token, {reference.shape[-1]} of the "
                        "reference",
                        where=name,
                        remedy="Compare models of one vocabulary.",
                    )
                for i, targets in enumerate(batch[:, 1:]):
                    other = None if reference is None else reference[i, :-1]
                    try:
                        totals[name].add(logits[i, :-1], other, targets)
                    except NonFiniteError as error:
                        error.at(f"{name}, window {first + i}")
                        raise
            if progress is not None:
                progress(first + len(batch), rows)
    tokens = rows * (seqlen - 1)
    return {name: total.score(tokens, against is not None) for name, total in totals.items()}


@dataclass
class _Totals:
    """Sums over positions, fp64."""

    nll: float = 0.0
    kl: float = 0.0
    same: int = 0

    def add(
        self,
        logits: Float[Tensor, "T vocab"],
        reference: Float[Tensor, "T vocab"] | None,
        targets: Int[Tensor, " T"],
    ) -> None:
        step = max(1, _CHUNK_BYTES // (4 * logits.shape[-1]))
        for at in (slice(i, i + step) for i in range(0, len(targets), step)):
            p = _log_softmax(logits[at], "its logits")
            self.nll -= _sum(p.gather(1, targets[at, None].to(p.device)))
            if reference is not None:
                r = _log_softmax(reference[at].to(p.device), "the logits of the reference")
                self.kl += _sum((r.exp() * (r - p)).sum(-1))
                self.same += int((p.argmax(-1) == r.argmax(-1)).sum())

    def score(self, tokens: int, compared: bool) -> Score:
        return Score(
            perplexity=float(torch.tensor(self.nll / tokens, dtype=torch.float64).exp()),
            kl=self.kl / tokens if compared else None,
            top1=self.same / tokens if compared else None,
            tokens=tokens,
        )


def _log_softmax(logits: Float[Tensor, "T vocab"], whose: str) -> Float[Tensor, "T vocab"]:
    p = torch.log_softmax(logits.float(), dim=-1)
    if not bool(torch.isfinite(p.min())):  # a NaN, and an infinity of either sign, end here
        raise NonFiniteError(f"{whose} are not finite")
    return p


def _sum(values: Tensor) -> float:
    return float(values.cpu().double().sum())


def _logits(model: nn.Module, batch: Int[Tensor, "rows seqlen"]) -> Float[Tensor, "rows seqlen V"]:
    held = (tensor.device for tensor in chain(model.parameters(), model.buffers()))
    device = next((device for device in held if device.type != "meta"), batch.device)
    return model(input_ids=batch.to(device), use_cache=False).logits
