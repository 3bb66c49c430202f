"""Replay: the calibration set as one decoder layer sees it.

No algorithm runs a layer or writes a hook. It asks for statistics of the inputs of named modules,
and replay streams them, batch by batch, into a reduction. Modules that are fed the same tensor
share one reduction. Padding never counts.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ongrid.calibrate.capture import Capture
from ongrid.calibrate.chain import Chain
from ongrid.calibrate.data import ModelCall
from ongrid.errors import NonFiniteError, StructureError
from ongrid.nn import ActivationQuantizer, QuantLinear, bypassed, held, quant_linears

Propagation = Literal["quantized", "float"]
"""Whether the next layer sees what the quantized layer puts out, or what the float layer does."""

Reported = Callable[[int, int, str], None]
"""Called with what is done and of how many, batches or steps, and what they are: the phase."""


class AbstractReduction(ABC):
    """A statistic that is built up from batches of rows."""

    @abstractmethod
    def update(self, x: Float[Tensor, "tokens features"]) -> None:
        """Takes in the inputs of one batch, padding removed."""


R = TypeVar("R", bound=AbstractReduction)


class Replay:
    """The batches that enter the layer at hand, and the way it is called for each of them.

    With `exact` a second chain goes along, on which every layer was and stays float: what an
    algorithm trains towards. `forwards` counts layer executions over all batches, for the record.
    """

    def __init__(
        self,
        found: Capture,
        propagate: Propagation,
        report: Reported = lambda done, total, phase: None,
        *,
        exact: bool = False,
    ) -> None:
        self.found = found
        self.propagate = propagate
        self.index = 0
        self.forwards = 0
        self.report = report
        self._float_outputs: Chain | None = None
        self._exact = found.hidden.fresh(found.hidden) if exact else None
        self._exact_is_ahead = False

    @property
    def hidden(self) -> Chain:
        """The inputs of the layer at hand, batch by batch."""
        return self.found.hidden

    def enter(self, index: int, kept: Mapping[str, Tensor] | None = None) -> None:
        """Moves on to a layer; `kept` replaces its inputs, when a run is taken up again."""
        self.index = index
        self._float_outputs = None
        self._exact_is_ahead = False
        for done in self.found.calls[:index]:
            done.clear()  # masks and tables that no later layer shares go
        if kept is not None:
            for chain, head in self._chains():
                for batch in range(len(chain)):
                    device = chain[batch].device
                    chain[batch] = kept[f"{head}{batch}"].to(device)

    def inputs(self) -> Mapping[str, Tensor]:
        """What `enter` takes: the inputs of the layer at hand by name, each read when asked for."""
        return _Named(self._chains())

    def _chains(self) -> list[tuple[Chain, str]]:
        return [(self.hidden, ""), *([] if self._exact is None else [(self._exact, "exact.")])]

    def tail(self, calls: Sequence[ModelCall], emit: list[Any]) -> None:
        """Moves on to what lies outside the layers: the model itself takes a layer's place.

        Its last layer is expected to hand out what `emit` holds, whatever it is called with. There
        are no targets any more: what the model itself returns is no hidden state.
        """
        self.found.calls = [[_TailCall(call, emit, self.found.handed_on) for call in calls]]
        self._exact = None
        self.enter(0)

    @torch.no_grad()
    def targets(self, layer: nn.Module) -> Chain | None:
        """What the float layer puts out on the float chain; None outside the layers.

        To be asked for before anything of the layer is changed. Costs one execution per batch.
        """
        if self._exact is not None and not self._exact_is_ahead:
            with bypassed(layer, activations=True):
                for batch, hidden in self._progress(self._exact):
                    self._exact[batch] = self.run(layer, batch, hidden)
            self._exact_is_ahead = True
        return self._exact

    def run(self, layer: nn.Module, batch: int, hidden: Tensor | None = None) -> Tensor:
        """The layer's output for a batch, or for another hidden state in that batch's place.

        Gradients flow where they are enabled.
        """
        hidden = self.hidden[batch] if hidden is None else hidden
        self.forwards += 1
        version = hidden._version
        out = self.found.calls[self.index][batch].run(layer, hidden)
        if hidden._version != version:
            raise StructureError(
                "the layer overwrites its input",
                remedy="It is run more than once on the same input: let it compute out of place.",
            )
        return out

    @torch.no_grad()
    def observe(
        self,
        layer: nn.Module,
        paths: Sequence[str],
        make: Callable[[], R],
        *,
        activations: bool,
    ) -> dict[str, R]:
        """Reduces what each named linear multiplies with (or each named module is fed).

        One execution of the layer per batch, with float weights. `activations` says whether its
        activation quantizers are live meanwhile. Linears that are fed the same tensor in every
        batch, through equal quantizers, share one reduction: the same object stands under each of
        their paths. A module that no batch reaches keeps an empty reduction. Raises
        `NonFiniteError` for a NaN or an infinity, `StructureError` for a module that is called more
        than once in a batch, or whose input is overwritten or has lost sight of the padding.
        """
        if not paths:
            return {}
        live = activations and any(isinstance(m, ActivationQuantizer) for m in layer.modules())
        if live:
            self.settle(layer)
        shared: _Sharing[R] = _Sharing(layer, paths, make)
        # Where quantization is off, the outputs are the next layer's inputs, without another run.
        float_run = self.propagate == "float" and not live
        outputs = self.hidden.fresh()
        with shared.watching(), bypassed(layer, activations=not activations):
            for batch, hidden in self._progress(self.hidden):
                out = self.run(layer, batch, hidden)
                shared.reduce(self.found.keep[batch], hidden.shape[:2])
                if float_run:
                    outputs.append(out)
                del out
        if float_run:
            self._float_outputs = outputs
        return shared.reductions()

    @torch.no_grad()
    def settle(self, layer: nn.Module) -> None:
        """Before the float weights go: makes sure that what float layers put out is there."""
        self.targets(layer)
        if self.propagate == "float" and self._float_outputs is None:
            outputs = self.hidden.fresh()
            with bypassed(layer, activations=True):
                for batch, hidden in self._progress(self.hidden):
                    outputs.append(self.run(layer, batch, hidden))
            self._float_outputs = outputs

    @torch.no_grad()
    def advance(self, layer: nn.Module) -> dict[str, Tensor]:
        """Replaces the inputs by the layer's outputs, the inputs of the next layer.

        Returns the weight matrix that each linear used meanwhile, by path.
        """
        if self.propagate == "float":
            assert self._float_outputs is not None
            self.found.hidden, self._float_outputs = self._float_outputs, None
            return {path: linear.weight for path, linear in quant_linears(layer).items()}
        with held(layer) as used:
            for batch, hidden in self._progress(self.hidden):
                self.hidden[batch] = self.run(layer, batch, hidden)
        return used

    def _progress(self, chain: Chain) -> Iterator[tuple[int, Tensor]]:
        """Every batch; one that is replaced meanwhile is not kept alive."""
        total = len(chain)
        for batch in range(total):
            yield batch, chain[batch]
            self.report(batch + 1, total, "forward")


class _Named(Mapping[str, Tensor]):
    """The batches of chains by name; one is in memory at a time."""

    def __init__(self, chains: list[tuple[Chain, str]]) -> None:
        self._at = {f"{h}{i}": (chain, i) for chain, h in chains for i in range(len(chain))}

    def __getitem__(self, name: str) -> Tensor:
        chain, batch = self._at[name]
        return chain[batch].contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


@dataclass
class _TailCall:
    """Calls the model with its layers replaced: the last hands out a given hidden state."""

    call: ModelCall
    emit: list[Any]
    handed_on: Callable[[Tensor], object]

    def run(self, model: nn.Module, hidden: Tensor) -> Tensor:
        self.emit[:] = [self.handed_on(hidden)]
        self.call.run(model)
        return hidden


@dataclass
class _Fed:
    """What one module was fed in the batch at hand."""

    x: Tensor
    version: int
    quantizer: str

    @property
    def key(self) -> tuple[int, int, str]:
        return id(self.x), self.version, self.quantizer


class _Sharing(Generic[R]):
    """Which modules share a reduction: those that have been fed the same tensor in every batch."""

    def __init__(self, layer: nn.Module, paths: Sequence[str], make: Callable[[], R]) -> None:
        self.layer = layer
        self.paths = list(paths)
        self.groups: list[tuple[list[str], R]] = [(self.paths, make())]
        self.fed: dict[str, _Fed] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for path in self.paths:
            module = self.layer.get_submodule(path)
            handles.append(self._watched(path, module))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watched(self, path: str, module: nn.Module) -> RemovableHandle:
        quantizer = None
        if isinstance(module, QuantLinear) and module.input_quantizer is not None:
            quantizer = module.input_quantizer

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if len(tensors) != 1:
                raise StructureError(
                    f"is called with {len(tensors)} tensors, not one",
                    where=path,
                    remedy="Keep it in float (grid: null).",
                )
            x = tensors[0]
            if path in self.fed:
                raise StructureError(
                    "is called more than once in one execution of its layer",
                    where=path,
                    remedy="Keep it in float (grid: null): its statistics would miss some inputs.",
                )
            settings = ""
            if quantizer is not None and not quantizer.bypassed:
                stored = () if quantizer.scale is None else (quantizer.scale, quantizer.zero)
                settings = f"{quantizer.grid} {[None if t is None else t.tolist() for t in stored]}"
            self.fed[path] = _Fed(x, x._version, settings)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def reduce(self, keep: Tensor | None, positions: torch.Size) -> None:
        """Takes in one batch; groups whose members were fed different tensors split."""
        split: list[tuple[list[str], R]] = []
        for members, reduction in self.groups:
            by_key: dict[object, list[str]] = {}
            for path in members:
                by_key.setdefault(self.fed[path].key if path in self.fed else None, []).append(path)
            # Until now the members had the same history, so each part goes on from a copy of it.
            copies = [copy.deepcopy(reduction) for _ in range(len(by_key) - 1)]
            for part, own in zip(by_key.values(), [reduction, *copies], strict=True):
                if part[0] in self.fed:
                    own.update(self._rows(part[0], keep, positions))
                split.append((part, own))
        self.groups = split
        self.fed.clear()

    def _rows(self, path: str, keep: Tensor | None, positions: torch.Size) -> Tensor:
        fed, module = self.fed[path], self.layer.get_submodule(path)
        x = fed.x
        if x._version != fed.version:
            raise StructureError(
                "the input was changed in place after the module had used it", where=path
            )
        if isinstance(module, QuantLinear) and module.input_quantizer is not None:
            x = module.input_quantizer(x)
        if keep is not None:
            if x.shape[:2] != positions and x.shape[0] != positions.numel():
                raise StructureError(
                    f"padding cannot be told apart in an input of shape {tuple(x.shape)}",
                    where=path,
                    remedy="Calibrate with rows of equal length and no padding.",
                )
            x = x[keep] if x.shape[:2] == positions else x[keep.flatten()]
        rows = x.reshape(-1, x.shape[-1])
        if not bool(torch.isfinite(rows.sum())) and not bool(torch.isfinite(rows).all()):
            raise NonFiniteError(
                f"{int((~torch.isfinite(rows)).sum())} of {rows.numel()} inputs are not finite",
                where=path,
                remedy="The float model overflows here. Load it in bfloat16 or float32.",
            )
        return rows

    def reductions(self) -> dict[str, R]:
        return {path: reduction for members, reduction in self.groups for path in members}
