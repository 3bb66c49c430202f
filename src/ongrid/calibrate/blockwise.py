"""Training one decoder layer on its grid, towards what the float model puts out there.

The engine of the algorithms that train block by block. The layer is fed what the quantized layers
before it put out, and its output is drawn to what the float layer puts out on the float chain:

    e = layer(h_quantized) - layer_float(h_float)                for each token
    loss = mean over tokens of |e|^2 / features                  "mse"
    loss = mean over tokens of |e|^2 / |layer_float(h_float)|^2  "relative"

The published algorithms take the first. In models with massive activations a handful of tokens, a
hundred times as long as the others, makes up nearly all of it; the second gives every token the
weight that the next layer's norm will give it.

A step is one calibration batch, in the order of the set. Batches and targets are read from the
replay when their step comes, so memory does not grow with the set. An algorithm brings what it
trains, its optimizer and its schedule; what is common is here: the loss (padding never counts),
where to start, a part of the set that only judges, clipping, what is kept, and stopping at the
first loss that is not finite.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ongrid.calibrate.algorithm import AbstractAlgorithm, Notes
from ongrid.calibrate.chain import Chain
from ongrid.calibrate.gptq import Gptq
from ongrid.calibrate.ranges import Mse, calibrate_activations
from ongrid.calibrate.replay import Propagation, Replay
from ongrid.errors import CalibrationError, ConfigError, NonFiniteError
from ongrid.nn import LatentWeight, QuantizerSpec, held, quant_linears

Start = Literal["rtn", "mse", "gptq"]

Loss = Literal["mse", "relative"]

Weights = Mapping[str, LatentWeight]
"""The weights of one layer that have a grid, by the path of their linear."""


@dataclass
class Trained:
    """What trains in a layer.

    `leaves`: what gradients are taken of, each with its fp32 master (itself, where it is one).
    `optimizer` steps the masters; the rates in its groups are those of the first step. `finish`
    leaves `LatentWeight`s in the layer that freeze to what was trained.
    """

    leaves: Sequence[tuple[nn.Parameter, nn.Parameter]]
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None]

    @torch.no_grad()
    def publish(self) -> None:
        """Brings the leaves to where their masters are, rounded to their own dtypes."""
        for leaf, master in self.leaves:
            if leaf is not master:
                leaf.copy_(master)


class _Snapshot:
    """A state of what trains."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.held = [master.detach().clone() for _, master in trained.leaves]

    @torch.no_grad()
    def take(self) -> None:
        for kept, (_, master) in zip(self.held, self.trained.leaves, strict=True):
            kept.copy_(master)

    @torch.no_grad()
    def restore(self) -> None:
        for kept, (_, master) in zip(self.held, self.trained.leaves, strict=True):
            master.copy_(kept)
        self.trained.publish()


@dataclass(frozen=True)
class AbstractBlockwise(AbstractAlgorithm):
    """What all training of single layers has in common.

    `start`: plain rounding, the ranges of least squared error, or GPTQ's scales and compensated
    weights. `loss`: see this module. `clip`: the largest norm of a step's gradient. `validation`:
    share of the batches, from the end of the set, that is not trained on but judges after each pass
    over the others; the best pass is kept, and training ends after `patience` passes (0: never)
    without a better one.
    `autocast`: products in bfloat16 while training, for a float32 model.

    The result is never worse on the batches that judge (without `validation`: on all of them) than
    the start or plain rounding; where training made the layer worse, it is undone.
    """

    start: Start = "rtn"
    loss: Loss = "mse"
    clip: float | None = None
    validation: float = 0.0
    patience: int = 0
    autocast: bool = False
    propagate: Propagation = "quantized"
    needs_targets: ClassVar[bool] = True
    keeps_best_step: ClassVar[bool] = False
    """Without `validation`: whether the best single step is kept, or the last."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip must be above 0, not {self.clip}", where=name)
        if not 0 <= self.validation < 1:
            what = f"validation must be at least 0 and below 1, not {self.validation}"
            raise ConfigError(what, where=name)
        if self.patience < 0 or (self.patience and not self.validation):
            raise ConfigError(
                f"patience is {self.patience} with a validation share of {self.validation}",
                where=name,
                remedy="It counts passes without a better validation loss: set validation too.",
            )

    @abstractmethod
    def steps(self, batches: int) -> int:
        """How many steps a layer trains for, given so many batches."""

    @abstractmethod
    def rate(self, step: int, steps: int) -> float:
        """The factor of the learning rates in a step, counted from 0."""

    @abstractmethod
    def trained(self, layer: nn.Module, weights: Weights) -> Trained:
        """Makes what trains, out of weights that hold the start."""

    def needs_inputs(self, specs: Mapping[str, QuantizerSpec]) -> bool:
        return bool(specs)

    def run(self, layer: nn.Module, replay: Replay) -> Notes:
        plain = _weights(layer)
        targets = replay.targets(layer) if plain else None
        notes = self._begin(layer, replay)
        if targets is None:  # nothing to train, or outside the layers
            return notes
        task = _Task(layer, replay, targets, self.autocast, relative=self.loss == "relative")
        judge = _Judge(task, self.validation)
        weights = {path: _trainable(weight) for path, weight in _weights(layer).items()}
        losses = {}
        if self.start != "rtn":
            plain = {path: _plain(weight) for path, weight in plain.items()}
            _put(layer, plain)
            losses["plain"] = judge.loss()
        _put(layer, weights)
        losses["start"] = judge.loss()
        before = {path: weight.freeze().parts.codes for path, weight in weights.items()}
        with torch.enable_grad():
            trained = self.trained(layer, weights)
        start = _Snapshot(trained)
        steps = _Training(self, trained, judge).run()
        losses["trained"] = judge.loss()
        best = min(losses, key=lambda name: (losses[name], name != "trained"))
        if best != "trained":
            start.restore()
        trained.finish()
        if best == "plain":
            _put(layer, plain)
        for path, note in _told(layer, before, losses, steps).items():
            notes[path] = notes.get(path, {}) | note
        return notes

    def _begin(self, layer: nn.Module, replay: Replay) -> Notes:
        if self.start == "gptq":
            return Gptq().compensate(layer, replay)
        return (Mse().run if self.start == "mse" else calibrate_activations)(layer, replay)


@dataclass(frozen=True)
class _Task:
    """A layer, the batches that it is fed, and what it should put out."""

    layer: nn.Module
    replay: Replay
    targets: Chain
    autocast: bool
    relative: bool

    def squares(self, batch: int) -> Float[Tensor, "tokens features"]:
        """Squared errors of the output for a batch, float32, padding left out; their mean is the
        loss.
        """
        with held(self.layer):
            out = self.replay.run(self.layer, batch)
        exact, keep = self.targets[batch], self.replay.found.keep[batch]
        if keep is not None:
            out, exact = out[keep], exact[keep]
        exact = exact.float()
        squares = (out.float() - exact).square()
        if self.relative:
            size = exact.square().mean(-1, keepdim=True)
            squares = squares / size.clamp_min(torch.finfo(torch.float32).tiny)
        return squares.flatten(0, -2)

    def gradients(
        self, batch: int, leaves: Sequence[nn.Parameter]
    ) -> tuple[float, list[Tensor | None]]:
        """The loss of a batch, and its gradients in float32."""
        kind = leaves[0].device.type
        with torch.enable_grad():
            with torch.autocast(kind, torch.bfloat16, enabled=self.autocast):
                squares = self.squares(batch)
            loss = squares.mean()
            # A mean over a million numbers has gradients that float16 cannot hold. A power of two
            # costs no digit on the way there and back.
            scale = 2.0 ** math.floor(math.log2(max(squares.numel(), 1)))
            found = torch.autograd.grad(loss * scale, leaves, allow_unused=True)
        gradients = [g.float() / scale if isinstance(g, Tensor) else None for g in found]
        return float(loss.detach()), gradients


class _Judge:
    """The loss of a layer as it stands, over the batches that judge: all of them, or a part."""

    def __init__(self, task: _Task, validation: float) -> None:
        count = len(task.replay.hidden)
        aside = math.ceil(count * validation)
        if aside >= count:
            raise CalibrationError(
                f"a validation share of {validation:g} leaves none of {count} batches to train on",
                remedy="Give more batches, or smaller ones.",
            )
        self.task = task
        self.trains_on = range(count - aside)
        self.batches = range(count - aside, count) if aside else self.trains_on
        self.apart = aside > 0
        self.of_batch: dict[int, float] = {}

    @torch.no_grad()
    def loss(self) -> float:
        """The mean over all tokens and features; infinite where it is not finite."""
        total, count = 0.0, 0
        for batch in self.batches:
            squares = self.task.squares(batch)
            self.of_batch[batch] = float(squares.mean())
            total += float(squares.sum(dtype=torch.float64))
            count += squares.numel()
        mean = total / max(count, 1)
        return mean if math.isfinite(mean) else math.inf


class _Training:
    """The steps of one layer."""

    def __init__(self, algorithm: AbstractBlockwise, trained: Trained, judge: _Judge) -> None:
        self.algorithm, self.trained, self.judge = algorithm, trained, judge
        self.rates = [group["lr"] for group in trained.optimizer.param_groups]
        self.at_start = dict(judge.of_batch)
        self.best = _Snapshot(trained)
        self.least = math.inf

    def run(self) -> int:
        """Trains, and leaves the state that is kept; returns the number of steps made."""
        batches, stale, step = self.judge.trains_on, 0, -1
        total = self.algorithm.steps(len(batches))
        leaves = [leaf for leaf, _ in self.trained.leaves]
        last = _Snapshot(self.trained)
        by_step = self.algorithm.keeps_best_step and not self.judge.apart
        for step in range(total):
            batch = batches[step % len(batches)]
            loss, gradients = self.judge.task.gradients(batch, leaves)
            if not math.isfinite(loss):
                last.restore()
                raise NonFiniteError(
                    f"the loss is {loss} in step {step} of {total}",
                    remedy="The layer holds the last state whose loss was finite. Train at a lower "
                    "rate, with clip=1.0, or the model in bfloat16 or float32.",
                )
            last.take()
            if by_step:  # batches differ, so each is compared with itself
                self._keep(loss / max(self.at_start[batch], torch.finfo(torch.float32).tiny))
            self._step(gradients, self.algorithm.rate(step, total))
            self.judge.task.replay.report(step + 1, total, "train")
            if self.judge.apart and (step + 1) % len(batches) == 0:
                stale = 0 if self._keep(self.judge.loss()) else stale + 1
                if stale and stale == self.algorithm.patience:
                    break
        if self.least < math.inf:
            self.best.restore()
        return step + 1

    def _keep(self, score: float) -> bool:
        if score < self.least:
            self.least = score
            self.best.take()
            return True
        return False

    @torch.no_grad()
    def _step(self, gradients: Sequence[Tensor | None], factor: float) -> None:
        masters = [master for _, master in self.trained.leaves]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        if self.algorithm.clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, self.algorithm.clip)
        for group, rate in zip(self.trained.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.trained.optimizer.step()
        self.trained.optimizer.zero_grad()
        self.trained.publish()


def _weights(layer: nn.Module) -> dict[str, LatentWeight]:
    weights = {path: linear.weight_quantizer for path, linear in quant_linears(layer).items()}
    return {path: weight for path, weight in weights.items() if isinstance(weight, LatentWeight)}


def _put(layer: nn.Module, weights: Mapping[str, LatentWeight]) -> None:
    linears = quant_linears(layer)
    for path, weight in weights.items():
        linears[path].weight_quantizer = weight


def _plain(weight: LatentWeight) -> LatentWeight:
    """Plain rounding of what a weight holds, whatever range it has been given."""
    return LatentWeight(weight.grid, weight.latent, weight.dtype)


def _trainable(weight: LatentWeight) -> LatentWeight:
    """The same weight with an fp32 master of its own, which freezes to the same parts."""
    parts = weight.freeze().parts
    master = weight.latent.detach().to(torch.float32, copy=True)
    return LatentWeight(weight.grid, master, weight.dtype, (parts.scale, parts.zero))


def _told(
    layer: nn.Module, before: Mapping[str, Tensor], losses: Mapping[str, float], steps: int
) -> Notes:
    """The layer's losses, and the share of each weight's codes that training moved."""
    notes: Notes = {}
    for path, weight in _weights(layer).items():
        moved = (weight.freeze().parts.codes != before[path]).float().mean()
        told: dict[str, Any] = {f"loss_{name}": loss for name, loss in losses.items()}
        notes[path] = {**told, "steps": steps, "codes_moved": float(moved)}
    return notes
