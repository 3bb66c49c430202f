"""GPTQ: rounds a weight column by column and lets later columns make up for the error.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers" (2022). In this house's letters, for inputs X `[tokens in]`:

    H = X^T X,   U = upper Cholesky factor of (H + damping)^-1
    for each column j:   q_j = encode(w_j),   e_j = (w_j - decode(q_j)) / U_jj
                         w_k -= e_j U_jk      for all k > j

The columns that follow are updated one block at a time (the paper's lazy batches), here from the
left: a block collects the errors of all earlier columns in one matrix product when it is reached,
and inside it a column collects those of its block when it is reached. That reads the errors once
and writes each column once. Rows are independent, so linears that see the same input share H and U,
and are swept as one matrix. With `act_order` (the default) all scales are fitted before the sweep,
from the source's columns; without it, a group's scale is fitted when the sweep reaches it, from the
already updated columns.

Left out: the paper's float16 storage of H (statistics are float32 here). Added: a row whose error
tr(E H E^T) came out above that of plain rounding keeps plain rounding, and is counted; damping
escalates when a factorisation fails, and a module whose H cannot be factorised at all is rounded
plainly and named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ongrid.calibrate.algorithm import AbstractAlgorithm, Notes
from ongrid.calibrate.ranges import Mse, calibrate_activations, search_range
from ongrid.calibrate.replay import AbstractReduction, Propagation, Replay
from ongrid.errors import ConfigError, NonFiniteError, OngridError
from ongrid.grid import Grid, Parts, QTensor
from ongrid.grid.grid import decode_each, encode_each
from ongrid.nn import AbstractWeight, CodedWeight, LatentWeight, QuantizerSpec, quant_linears

_ESCALATION = 10.0
_ROWS_AT_ONCE = 1024
_NUMBERS_AT_ONCE = 2**21
_STRIPE = 512
_MOST_DAMPING = 10.0


class SecondMoment(AbstractReduction):
    """X^T X, float32 `[in in]`, and the number of tokens.

    The matrix is symmetric, so only stripes of rows up to the diagonal's end are summed: for wide
    inputs little more than half of it.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.stripes: list[Float[Tensor, "rows columns_so_far"]] = []

    def update(self, x: Float[Tensor, "tokens features"]) -> None:
        self.tokens += x.shape[0]
        size = x.shape[1]
        if not self.stripes:
            self.stripes = [
                torch.zeros(stop - start, stop, dtype=torch.float32, device=x.device)
                for start, stop in _spans(size)
            ]
        # Numbers that already are bfloat16 have exact products in float32, so letting the matrix
        # unit take them as they are loses nothing; float32 inputs are multiplied as float32.
        exact = x.dtype == torch.bfloat16 and x.device.type == "cpu"
        with _bf16_products() if exact else nullcontext():
            # A part at a time: the float32 copy of a whole batch would be the largest block of all.
            for part in x.split(max(_ROWS_AT_ONCE, _NUMBERS_AT_ONCE // size)):
                rows = part.float()
                for (start, stop), stripe in zip(_spans(size), self.stripes, strict=True):
                    stripe.addmm_(rows[:, start:stop].T, rows[:, :stop])

    @property
    def sum(self) -> Float[Tensor, "in in"] | None:
        """The whole matrix, put together anew; None before the first token."""
        if not self.stripes:
            return None
        size = self.stripes[-1].shape[1]
        whole = self.stripes[0].new_empty(size, size)
        for (start, stop), stripe in zip(_spans(size), self.stripes, strict=True):
            whole[start:stop, :stop] = stripe
            whole[:start, start:stop] = stripe[:, :start].T
        return whole


def _spans(size: int) -> list[tuple[int, int]]:
    """Stripes of equal height, high enough for one product to be worth its start."""
    count = max(1, size // _STRIPE)
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """A column is too small to share: handing it over costs more than computing it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _bf16_products() -> Iterator[None]:
    """Lets float32 products be formed from bfloat16 factors, with float32 sums."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Gptq(AbstractAlgorithm):
    """Error-compensating rounding of weights, layer by layer.

    `damp`: share of the mean diagonal of H that is added to it. `act_order`: columns in order of
    falling diagonal, with scales fitted before the sweep; groups and codes stay in the order of the
    source, so that nothing that reads them has to know.
    `scales`: how a scale is fitted, to the range or to the least squared error. `block`: columns
    whose updates are collected in one product, where groups do not say it.
    """

    damp: float = 0.01
    act_order: bool = True
    scales: Literal["max", "mse"] = "max"
    block: int = 128
    propagate: Propagation = "quantized"

    def __post_init__(self) -> None:
        if not 0 < self.damp <= _MOST_DAMPING:
            raise ConfigError(
                f"damp must be above 0 and at most {_MOST_DAMPING:g}, not {self.damp}", where="gptq"
            )
        if self.block < 1:
            raise ConfigError(f"block must be at least 1, not {self.block}", where="gptq")

    def needs_inputs(self, specs: Mapping[str, QuantizerSpec]) -> bool:
        return bool(specs)

    def run(self, layer: nn.Module, replay: Replay) -> Notes:
        return self._run(layer, replay, trainable=False)

    def compensate(self, layer: nn.Module, replay: Replay) -> Notes:
        """As `run`, but what is left is trainable: weights hold, in float32, the columns as they
        were when their turn to be rounded came. Law: their codes are those that `run` gives.
        """
        return self._run(layer, replay, trainable=True)

    def _run(self, layer: nn.Module, replay: Replay, *, trainable: bool) -> Notes:
        notes = calibrate_activations(layer, replay)
        linears = {
            path: linear
            for path, linear in quant_linears(layer).items()
            if isinstance(linear.weight_quantizer, LatentWeight)
        }
        moments = replay.observe(layer, list(linears), SecondMoment, activations=True)
        for moment in dict.fromkeys(moments.values()):
            paths = [path for path, m in moments.items() if m is moment]
            # The largest tensor of the run lives only here, and goes as soon as it has been used.
            h, moment.stripes = moment.sum, []
            for alike in _stacks({p: _latent(linears[p]) for p in paths}):
                try:
                    solved, note = self._solve(h, moment.tokens, alike, trainable=trainable)
                except OngridError as error:
                    raise error.at(", ".join(alike)) from None
                for path, weight in solved.items():
                    linears[path].weight_quantizer = weight
                notes |= note
            del h
        return notes

    def _solve(
        self, h: Tensor | None, tokens: int, weights: Mapping[str, LatentWeight], *, trainable: bool
    ) -> tuple[dict[str, AbstractWeight], Notes]:
        """Sweeps weights that share inputs and grid as one matrix; what stays plain is left out."""
        first = next(iter(weights.values()))
        w = torch.cat([weight.latent.detach().float() for weight in weights.values()])
        if h is None:
            return {}, {path: {"tokens": 0, "rounded_plainly": "no token"} for path in weights}
        if not bool(torch.isfinite(h).all()):
            raise NonFiniteError(
                "the second moment of the inputs is not finite",
                remedy="The inputs overflow float32 when squared: scale them, or keep this float.",
            )
        order = h.diagonal().argsort(descending=True, stable=True) if self.act_order else None
        factor = factorise(h, self.damp, order)
        common = {"tokens": tokens, "dead_columns": int((h.diagonal() == 0).sum())}
        if factor is None:
            reason = f"no damping up to {_MOST_DAMPING:g} makes H positive definite"
            return {}, {path: {**common, "rounded_plainly": reason} for path in weights}
        grid, dtype = first.grid, first.dtype
        columns = torch.empty_like(w) if trainable else None
        swept = sweep(
            grid, w, factor.u, dtype, fit=self._fit, block=self.block, order=order, columns=columns
        )
        parts, kept = _never_worse(grid, w, h, _plain_parts(weights), swept, dtype)
        solved, notes = _split(grid, parts, kept, weights, {**common, "damp": factor.damp})
        if columns is None:
            return {path: CodedWeight(q, dtype) for path, q in solved.items()}, notes
        columns = torch.where(kept[:, None], w, columns)
        of_each = columns.split([weights[path].shape[0] for path in solved])
        return {
            path: LatentWeight(grid, own.clone(), dtype, (q.parts.scale, q.parts.zero))
            for (path, q), own in zip(solved.items(), of_each, strict=True)
        }, notes

    def _fit(self, grid: Grid, w: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor | None]:
        if self.scales == "mse":
            return search_range(grid, w, dtype, Mse.shrink, Mse.steps)
        return grid.fit(w, dtype)


class Factor(NamedTuple):
    """The upper Cholesky factor of a damped inverse, and the share of damping that it took."""

    u: Float[Tensor, "in in"]
    damp: float


def factorise(h: Float[Tensor, "in in"], damp: float, order: Tensor | None = None) -> Factor | None:
    """U with (H + damping)^-1 = U^T U, U upper triangular; None where no damping is enough.

    With `order`, U is the factor of H with its columns (and rows) in that order. An input that
    never was anything but 0 gets 1 on the diagonal: its column is then rounded plainly and takes
    part in nothing. Damping grows tenfold until the factorisation succeeds.
    """
    # With P the reversal of order: P H P = L L^T, so that H = R R^T with R = P L P upper
    # triangular, and U = R^-1. One factorisation instead of two, and no inverse of H is formed.
    size = h.shape[0]
    backwards = torch.arange(size, device=h.device) if order is None else order
    backwards = backwards.flip(0)
    diagonal = h.diagonal()[backwards]
    dead = diagonal == 0
    level = diagonal[~dead].mean() if not bool(dead.all()) else torch.zeros(())
    while damp <= _MOST_DAMPING:
        damped = h.index_select(0, backwards).index_select(1, backwards)
        damped.diagonal().add_(torch.where(dead, 1.0, damp * level))
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped  # here lies the peak of memory
        if not int(failed):
            one = torch.eye(size, dtype=h.dtype, device=h.device)
            u = torch.linalg.solve_triangular(lower, one, upper=False)
            del lower, one
            if bool(torch.isfinite(u.sum())):
                return Factor(u.flip(0, 1), damp)
        damp *= _ESCALATION
    return None


def sweep(
    grid: Grid,
    w: Float[Tensor, "out in"],
    u: Float[Tensor, "in in"],
    dtype: torch.dtype,
    *,
    fit: Any = Grid.fit,
    block: int = 128,
    order: Tensor | None = None,
    columns: Float[Tensor, "out in"] | None = None,
) -> Parts:
    """Codes, scales and zeros of w `[out in]` float32 under the factor u; w itself stays unchanged.

    `columns` takes each column as it was when it was rounded.

    With `order`, the sweep takes columns in that order (u is the factor in that order), and all
    scales are fitted beforehand. So they are where a scale spans the row or lies on a grid of its
    own.
    """
    size = w.shape[1]
    width = size if grid.blocks.cols == -1 else grid.blocks.cols
    static = order is not None or width == size or not isinstance(grid.scale, torch.dtype)
    scale, zero = fit(grid, w, dtype) if static else (None, None)
    groups = torch.arange(size, device=w.device) // width
    wt = w.T.contiguous()
    if order is not None:
        groups, wt = groups[order], wt[order]
    errors = torch.empty_like(wt)
    codes = torch.empty(wt.shape, dtype=torch.uint8, device=w.device)
    fitted: list[tuple[Tensor, Tensor | None]] = []
    step = block if static else width
    of_groups = _of_rows(grid, scale, zero, w.shape[0]) if static else []
    for start in range(0, size, step):
        stop = min(start + step, size)
        if start:
            wt[start:stop].addmm_(u[:start, start:stop].T, errors[:start], alpha=-1)
        if static:
            last = len(of_groups) - 1
            of_columns = [of_groups[min(group, last)] for group in groups[start:stop].tolist()]
        else:
            fitted.append(fit(grid, wt[start:stop].T, dtype))
            of_columns = _of_rows(grid, *fitted[-1], w.shape[0]) * (stop - start)
        codes[start:stop] = _sweep_block(
            grid, wt[start:stop], u[start:stop, start:stop], of_columns, dtype, errors[start:stop]
        )
    if columns is not None:
        columns.copy_((wt if order is None else wt[order.argsort()]).T)
    if order is not None:
        codes = codes[order.argsort()]
    if not static:
        scale = torch.cat([s for s, _ in fitted], 1)
        zeros = [z for _, z in fitted if z is not None]
        zero = torch.cat(zeros, 1) if zeros else None
    return Parts(codes.T.contiguous(), scale, zero)


def _sweep_block(
    grid: Grid,
    wt: Float[Tensor, "columns out"],
    u: Float[Tensor, "columns columns"],
    of_columns: list[tuple[Tensor, Tensor | None]],
    dtype: torch.dtype,
    errors: Float[Tensor, "columns out"],
) -> Float[Tensor, "columns out"]:
    """Codes of consecutive columns, and their errors into `errors`, each from those before it.

    `wt` is left with the columns as they were rounded.

    The loop costs what its operations cost to start, so it has as few of them as can be.
    """
    codes = []
    # With a unit diagonal the factor takes errors that are not divided yet, all at once at the end:
    # e_j U_jk = (U_jj e_j) (U_jk / U_jj).
    feeding = (u / u.diagonal()[:, None]).T.contiguous()
    rows = zip(wt.unbind(), of_columns, feeding.unbind(), errors.unbind(), strict=True)
    with _one_thread():
        for j, (column, (s, z), feeds, error) in enumerate(rows):
            if j:
                column.addmv_(errors[:j].T, feeds[:j], alpha=-1)
            codes.append(encode_each(grid, column, s, z))
            torch.sub(column, decode_each(grid, codes[-1], s, z).to(dtype), out=error)
    errors /= u.diagonal()[:, None]
    return torch.stack(codes)


def _of_rows(
    grid: Grid, scale: Any, zero: Tensor | None, rows: int
) -> list[tuple[Float[Tensor, " out"], Float[Tensor, " out"] | None]]:
    """The scale and the zero of every row as float32, group by group."""

    def wide(t: Tensor) -> list[Tensor]:
        return list(t.float().T.repeat_interleave(rows // t.shape[0], 1).contiguous().unbind())

    s = grid.scales(scale)
    scales = [s.expand(rows)] if s.dim() == 0 else wide(s)
    return list(zip(scales, [None] * len(scales) if zero is None else wide(zero), strict=True))


def row_errors(e: Float[Tensor, "out in"], h: Float[Tensor, "in in"]) -> Float[Tensor, "out"]:
    """The algorithm's objective: e H e^T of each row, the squared error of its outputs."""
    return ((e @ h) * e).sum(1)


def _latent(linear: Any) -> LatentWeight:
    assert isinstance(linear.weight_quantizer, LatentWeight)
    return linear.weight_quantizer


def _stacks(weights: Mapping[str, LatentWeight]) -> list[dict[str, LatentWeight]]:
    """Weights that can be swept as one matrix: equal grids whose rows do not share a scale."""
    stacks: dict[object, dict[str, LatentWeight]] = {}
    for path, weight in weights.items():
        alone = weight.grid.blocks.rows != 1 or isinstance(weight.grid.scale, Grid)
        key = path if alone else (weight.grid, weight.dtype)
        stacks.setdefault(key, {})[path] = weight
    return list(stacks.values())


def _plain_parts(weights: Mapping[str, LatentWeight]) -> Parts:
    """What plain rounding stores of stacked weights."""
    parts: list[Any] = [weight.freeze().parts for weight in weights.values()]
    if len(parts) == 1:
        return parts[0]
    stacked: list[Any] = [None if t[0] is None else torch.cat(t) for t in zip(*parts, strict=True)]
    return Parts(*stacked)


def _never_worse(
    grid: Grid, w: Tensor, h: Tensor, plain: Parts, swept: Parts, dtype: torch.dtype
) -> tuple[Parts, Tensor]:
    """Keeps plain rounding in the rows where the sweep ended worse; says which rows those are.

    Rows that share a scale are kept or swept together.
    """
    shared = w.shape[0] if isinstance(grid.scale, Grid) else -1
    losses = []
    for parts in (plain, swept):
        losses.append(row_errors(w - grid.decode(parts, dtype).float(), h))
    per_block = shared if shared > 0 else grid.blocks.rows
    size = w.shape[0] if per_block == -1 else per_block
    before, after = (loss.reshape(-1, size).sum(1) for loss in losses)
    worse = ~(after <= before)
    rows = worse.repeat_interleave(size)
    if not bool(worse.any()):
        return swept, rows
    if isinstance(plain.scale, Parts) or isinstance(swept.scale, Parts):
        return plain, rows
    return (
        Parts(
            torch.where(rows[:, None], plain.codes, swept.codes),
            _choose(worse, plain.scale, swept.scale),
            _choose(worse, plain.zero, swept.zero),
        ),
        rows,
    )


def _choose(worse: Tensor, plain: Tensor | None, swept: Tensor | None) -> Tensor | None:
    if plain is None or swept is None:
        return None
    return torch.where(worse[:, None], plain, swept)


def _split(
    grid: Grid,
    parts: Parts,
    kept: Tensor,
    weights: Mapping[str, LatentWeight],
    common: dict[str, Any],
) -> tuple[dict[str, QTensor], Notes]:
    """Cuts a stacked result into the matrices that it was stacked from."""
    if len(weights) == 1:
        path = next(iter(weights))
        rows_kept = int(kept.sum())
        return {path: QTensor(grid, parts)}, {path: {**common, "rows_rounded_plainly": rows_kept}}
    solved: dict[str, QTensor] = {}
    notes: Notes = {}
    start = 0
    for path, weight in weights.items():
        rows = slice(start, start + weight.shape[0])
        start = rows.stop
        own: list[Any] = [t[rows].clone() if isinstance(t, Tensor) else None for t in parts]
        solved[path] = QTensor(grid, Parts(*own))
        notes[path] = {**common, "rows_rounded_plainly": int(kept[rows].sum())}
    return solved, notes
