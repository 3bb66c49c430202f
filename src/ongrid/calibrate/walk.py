"""The walk: one decoder layer at a time, from the first to the last, then what lies outside them.

    page in -> insert -> run the algorithm -> freeze -> advance -> write -> page out

Peak memory is one layer with its statistics and the calibration set's hidden states, whatever the
depth. A finished layer is a file; taking a run up again is skipping the layers whose files are
there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ongrid.calibrate.algorithm import AbstractAlgorithm, Notes
from ongrid.calibrate.capture import Capture, capture, evaluating
from ongrid.calibrate.chain import Chain
from ongrid.calibrate.data import ModelCall, run_all
from ongrid.calibrate.replay import Replay
from ongrid.errors import OngridError, ResumeError, VerifyError
from ongrid.grid import QTensor
from ongrid.nn import freeze, insert, insert_empty, place, quant_linears
from ongrid.recipe import Plan
from ongrid.store.artifact import REST, Artifact, layer_segment
from ongrid.store.memory import steady_heap
from ongrid.store.paging import AbstractSource
from ongrid.store.shards import tensor_hash

_HIDDEN_BYTES = 64 * 2**20
"""Hidden states that stay in memory; what exceeds them lies in a file."""


@dataclass(frozen=True)
class Progress:
    """Where a walk is: the segment at hand of all, what is being done, and how far that is."""

    segment: int
    segments: int
    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def walk(
    model: nn.Module,
    plan: Plan,
    algorithm: AbstractAlgorithm,
    source: AbstractSource,
    calls: Sequence[ModelCall],
    artifact: Artifact | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Notes:
    """Quantizes a model by a plan, in place, and writes each finished part to the artifact.

    `calls` is empty where no quantizer needs data. Returns the notes of the linears quantized in
    this run. An artifact that already holds finished layers is continued; into a model in memory
    they are put back.
    """
    with evaluating(model), steady_heap():
        return _Walk(model, plan, algorithm, source, list(calls), artifact, on_progress).run()


class _Walk:
    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        algorithm: AbstractAlgorithm,
        source: AbstractSource,
        calls: list[ModelCall],
        artifact: Artifact | None,
        on_progress: OnProgress,
    ) -> None:
        self.model = model
        self.plan = plan
        self.algorithm = algorithm
        self.source = source
        self.calls = calls
        self.artifact = artifact
        self.on_progress = on_progress
        self.layers = plan.stack.size
        self.index = 0
        self.rest_done = artifact is not None and artifact.record(REST) is not None
        self.replay: Replay

    def _report(self, done: int, total: int, phase: str) -> None:
        self.on_progress(Progress(self.index, self.layers + 1, phase, done, total))

    @torch.no_grad()
    def run(self) -> Notes:
        notes: Notes = {}
        start, kept = self._resume_point()
        if self.source.stays:
            self._put_back(start)
        last = self._last_layer_with_need()
        found = self._captured(kept) if last >= start else Capture()
        exact = self.algorithm.needs_targets
        self.replay = Replay(found, self.algorithm.propagate, self._report, exact=exact)
        self.replay.enter(start, kept)
        for index in range(start, self.layers):
            self.index = index
            notes |= self._layer(feeds_on=self.index < last)
        self.index = self.layers
        if not self.rest_done:
            notes |= self._rest()
        return notes

    def _captured(self, kept: Mapping[str, Tensor] | None) -> Capture:
        # What trains reads each batch once a step, which costs nothing beside the step.
        budget = 0 if self.algorithm.needs_targets else _HIDDEN_BYTES
        scratch = None if self.artifact is None else self.artifact.scratch()
        chain = Chain(budget=budget, folder=scratch)
        with self.source.on_demand(self.plan.stack.path):
            found = capture(self.model, self.plan.stack, run_all(self.calls), chain)
        self._check_kept(found, kept)
        return found

    # ---- resuming --------------------------------------------------------------------------------

    def _resume_point(self) -> tuple[int, Mapping[str, Tensor] | None]:
        """The first layer to be done, and its inputs if they are needed and were kept."""
        if self.artifact is None:
            return 0, None
        done = 0
        while done < self.layers and self.artifact.record(layer_segment(done)) is not None:
            done += 1
        if self._last_layer_with_need() < done:
            return done, None
        # Inputs are kept before the layer in front of them counts as done, so they may be one
        # ahead.
        for index in range(done, 0, -1):
            kept = self.artifact.inputs(index)
            if kept is not None:
                return index, kept
        return 0, None

    def _check_kept(self, found: Capture, kept: Mapping[str, Tensor] | None) -> None:
        """Data may differ where the caller accepts it, but not so that kept inputs fit no batch."""
        if kept is None:
            return
        now = found.hidden.shapes()
        shapes = {name.removeprefix("exact."): tuple(kept[name].shape) for name in kept}
        if shapes != {str(batch): shape for batch, shape in enumerate(now)}:
            assert self.artifact is not None
            raise ResumeError(
                f"the kept inputs are of other batches: {len(shapes)}, now {len(now)}, "
                "or of other sizes",
                where=str(self.artifact.folder),
                remedy="Use the data it was begun with, or a new output folder.",
            )

    def _last_layer_with_need(self) -> int:
        """The last layer whose inputs it or what lies outside needs; -1 for none."""
        if not self.calls:
            return -1
        if not self.rest_done and self.algorithm.needs_inputs(self.plan.outside()):
            return self.layers
        needy = [
            index
            for index, path in enumerate(self.plan.stack.paths)
            if self.algorithm.needs_inputs(self.plan.within(path)[0])
        ]
        return max(needy, default=-1)

    def _put_back(self, layers: int) -> None:
        """Puts what an earlier run has finished into a model in memory."""
        assert self.artifact is not None or not layers
        for index, path in enumerate(self.plan.stack.paths[:layers]):
            layer = self.model.get_submodule(path)
            insert_empty(layer, *self.plan.within(path))
            self._load(layer_segment(index), path)
        if self.rest_done:
            with _hidden_layers(self.model, self.plan):
                insert_empty(self.model, self.plan.outside(), self.plan.sites)
                self._load(REST, "")

    def _load(self, segment: str, path: str) -> None:
        assert self.artifact is not None
        head = f"{path}." if path else ""
        stored = {n.removeprefix(head): t for n, t in self.artifact.read(segment).items()}
        # A tied weight is stored under one of its names.
        self.model.get_submodule(path).load_state_dict(stored, strict=False)

    # ---- one layer -------------------------------------------------------------------------------

    def _layer(self, *, feeds_on: bool) -> Notes:
        path = self.plan.stack.paths[self.index]
        self.replay.enter(self.index)
        self.source.page_in(path)
        layer = self.model.get_submodule(path)
        specs, sites = self.plan.within(path)
        self._report(0, 1, "calibrate")
        with _located(path):
            insert(layer, specs, sites)
            notes = self.algorithm.run(layer, self.replay)
            changed = self.algorithm.also_trains(layer)
            if feeds_on:
                self.replay.settle(layer)
            frozen = freeze(layer)
            hashes = _proven(frozen, self._advance(layer, feeds_on))
        if self.artifact is not None:
            if feeds_on:
                self.artifact.keep_inputs(self.index + 1, self.replay.inputs())
            self._write(layer_segment(self.index), path, layer, notes, hashes, changed)
            self.artifact.drop_inputs(self.index)
            self.source.drop(path)
        self._report(1, 1, "done")
        return {f"{path}.{name}": note for name, note in notes.items()}

    def _advance(self, layer: nn.Module, feeds_on: bool) -> dict[str, Tensor]:
        """The weights that the layer multiplied with on its way on, or would multiply with."""
        if feeds_on:
            return self.replay.advance(layer)
        return {path: linear.weight for path, linear in quant_linears(layer).items()}

    def _write(
        self,
        segment: str,
        path: str,
        module: nn.Module,
        notes: Notes,
        hashes: Mapping[str, str],
        changed: Collection[str] = (),
    ) -> None:
        assert self.artifact is not None
        head = f"{path}." if path else ""
        tensors = {
            head + name: tensor if name in changed else self.source.original(head + name, tensor)
            for name, tensor in stored_state(module).items()
        }
        record: dict[str, Any] = {
            "changed": [head + name for name in sorted(changed)],
            "notes": {head + name: note for name, note in sorted(notes.items())},
            "used": {head + name: digest for name, digest in sorted(hashes.items())},
        }
        if segment == REST:
            # All in memory at once, with what lies outside: a segment is one file, and its writer
            # wants every size before the first byte.
            tensors |= dict(self.source.surplus())
        self.artifact.write(segment, tensors, record)

    # ---- what lies outside the layers ------------------------------------------------------------

    def _rest(self) -> Notes:
        specs = self.plan.outside()
        with _hidden_layers(self.model, self.plan) as emit:
            self.source.page_in("")
            self._report(0, 1, "outside")
            insert(self.model, specs, self.plan.sites)
            if self.replay.hidden and self.algorithm.needs_inputs(specs):
                self.replay.tail(self.calls, emit)
            notes = self.algorithm.run(self.model, self.replay) if specs else {}
            frozen = freeze(self.model)
            used = {path: linear.weight for path, linear in quant_linears(self.model).items()}
            hashes = _proven(frozen, used)
            if self.artifact is not None:
                self._write(REST, "", self.model, notes, hashes)
                self.artifact.drop_inputs(self.layers)
        self._report(1, 1, "done")
        return notes


def _proven(frozen: Mapping[str, QTensor], used: Mapping[str, Tensor]) -> dict[str, str]:
    """Hashes of the matrices that linears multiplied with, which are those that were frozen."""
    hashes = {path: tensor_hash(w) for path, w in used.items()}
    for path, q in frozen.items():
        if tensor_hash(q.dequantize(used[path].dtype)) != hashes[path]:
            raise VerifyError(
                "the layer multiplied with another matrix than was frozen",
                where=path,
                remedy="This is a fault of ongrid: please report it with the recipe.",
            )
    return hashes


class _Emitter(nn.Module):
    """Stands for a finished decoder layer, and hands out what the last layer had put out."""

    def __init__(self, emit: list[Any], like: nn.Module) -> None:
        super().__init__()
        self._emit = emit
        self._like = [like]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._emit[0]

    def __getattr__(self, name: str) -> Any:
        # A parent may read what it needs to know of a layer, such as its attention type.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_like"][0], name)


@contextmanager
def _hidden_layers(model: nn.Module, plan: Plan) -> Iterator[list[Any]]:
    """Within the context the decoder layers are out of sight, and hand out what the list holds."""
    emit: list[Any] = []
    layers = plan.stack.layers(model)
    for path, layer in zip(plan.stack.paths, layers, strict=True):
        place(model, path, _Emitter(emit, layer))
    try:
        yield emit
    finally:
        for path, layer in zip(plan.stack.paths, layers, strict=True):
            place(model, path, layer)


def stored_state(module: nn.Module) -> dict[str, Tensor]:
    """A module's state, with parameters that are one object under the first of their names only."""
    first = {name for name, _ in module.named_parameters()}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if name in first or name not in parameters
    }


@contextmanager
def _located(path: str) -> Iterator[None]:
    """Errors of a layer name the layer."""
    try:
        yield
    except OngridError as error:
        error.where = f"{path}.{error.where}" if error.where else path
        raise
