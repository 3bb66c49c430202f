"""Capture: one pass through a model that records how it calls each decoder layer.

For the duration of the pass every decoder layer's `forward` is replaced on the instance by a
recorder, which notes its arguments and hands the hidden state through. So one pass gives the masks,
rotary tables and flags of every layer while no decoder layer computes or is even loaded. The
recorder checks that each layer was handed the very object that the layer before it returned: a
parent that computes between its layers is refused, since replay would leave that out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ongrid.calibrate.chain import Chain
from ongrid.errors import CalibrationError, StructureError
from ongrid.nn import Stack, eval_mode
from ongrid.store.shards import tensor_hash

Drive = Callable[[nn.Module], object]
"""Runs the model over the calibration set, calling it once a batch."""

_HIDDEN = "hidden_states"

_FORMS = range(4)
"""A layer's output as its parent takes it: bare, or first in a tuple of 1, 2 or 3."""


class _Stop(BaseException):
    """Ends a model's forward after its last layer; no model's `except Exception` catches it."""


class _OtherForm(BaseException):
    """A parent did not find the hidden state in what the recorder returned."""


@dataclass
class Call:
    """How one layer is called for one batch: everything but the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_args: bool

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """The layer's next hidden state for a hidden state `[rows tokens features]`."""
        if self.in_args:
            out = layer(hidden, *self.args, **self.kwargs)
        else:
            out = layer(*self.args, **{_HIDDEN: hidden}, **self.kwargs)
        first = out[0] if isinstance(out, tuple | list) else out
        if not isinstance(first, Tensor) or first.shape != hidden.shape:
            raise StructureError(
                f"{type(layer).__name__} returned {type(first).__name__}"
                f"{tuple(first.shape) if isinstance(first, Tensor) else ''}, "
                f"not a hidden state {tuple(hidden.shape)}",
                remedy="Only layers that keep the shape of the hidden state can be walked.",
            )
        return first


@dataclass
class Capture:
    """What enters the first layer and how every layer is called, batch by batch."""

    hidden: Chain = field(default_factory=Chain)
    calls: list[list[Any]] = field(default_factory=list)
    """`calls[layer][batch]`; what layers share of a batch is one object."""
    keep: list[Bool[Tensor, "rows tokens"] | None] = field(default_factory=list)
    """Which positions hold tokens rather than padding; None where all do."""

    form: int = 0
    """The form in which the parent takes its layers' outputs."""

    def handed_on(self, hidden: Tensor) -> object:
        """A hidden state in the form of a layer's output."""
        return (hidden, *[None] * (self.form - 1)) if self.form else hidden

    @property
    def tokens(self) -> int:
        """Calibration tokens, padding not counted."""
        return sum(
            shape[0] * shape[1] if keep is None else int(keep.sum())
            for shape, keep in zip(self.hidden.shapes(), self.keep, strict=True)
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the context a model computes as it is deployed, whatever its caller has set.

    In eval mode, without autocast, in tensors that count their changes. Afterwards each module is
    in its own mode again; modules that were put in meanwhile are in that of the whole.
    """
    kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    with ExitStack() as settings:
        settings.enter_context(torch.inference_mode(False))
        for kind in sorted(kinds | {"cpu"}):
            settings.enter_context(torch.autocast(kind, enabled=False))
        settings.enter_context(eval_mode(model))
        yield


@torch.no_grad()
def capture(model: nn.Module, stack: Stack, drive: Drive, hidden: Chain | None = None) -> Capture:
    """Records every batch that `drive` runs; nothing of the model is changed afterwards.

    `hidden` is the empty chain that takes what enters the first layer. Raises `StructureError`
    where the layers are not a plain chain, where a layer is called out of turn, or where an
    argument is of a kind that cannot be kept for replay; `CalibrationError` where `drive` never
    reached the layers.
    """
    recorder = _Recorder(stack, model, Chain() if hidden is None else hidden)
    with recorder.installed():
        drive(model)
    found = recorder.capture
    if not found.tokens:
        raise CalibrationError(
            "the calibration set has no token"
            if found.hidden
            else "the calibration set has no batch",
            remedy="Give at least one batch of token ids whose mask is not all zero.",
        )
    return found


class _Recorder:
    def __init__(self, stack: Stack, model: nn.Module, hidden: Chain) -> None:
        self.stack = stack
        self.model = model
        self.layers = stack.layers(model)
        self.signature = inspect.signature(model.forward)
        self.capture = Capture(hidden, [[] for _ in self.layers])
        self._once = _Once()
        self._calls: list[Call] = []
        self._first: Tensor | None = None
        self._handed: object = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = {m: m.__dict__.get("forward") for m in (self.model, *self.layers)}
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = _bind(self._layer_called, index)
            self.model.forward = _bind(self._model_called, self.model.forward)
            with evaluating(self.model):
                yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = forward

    def _model_called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """One batch; the first one finds out in which form the parent takes its layers' outputs."""
        forms = [self.capture.form] if self.capture.hidden else list(_FORMS)
        if self._alone:
            # A tuple fails where a bare hidden state is expected, but not always the other way
            # round.
            forms.sort(key=lambda form: form == 0)
        failures: list[BaseException] = []
        for self.capture.form in forms:
            try:
                self._attempt(forward, args, kwargs)
                break
            except (_OtherForm, ValueError, TypeError, IndexError, AttributeError) as failure:
                # A parent that is handed another form than it takes fails in one of these ways.
                if not self._calls:
                    raise  # before any layer: the form has no part in it
                failures.append(failure)
        else:
            raise self._broken(failures)
        # A failure holds this frame, which holds the list: a circle around the model's layers.
        failures.clear()
        keep = self._keep(args, kwargs)
        assert self._first is not None
        self.capture.hidden.append(self._first)
        self.capture.keep.append(keep)
        self._once.forget_objects()
        for calls, call in zip(self.capture.calls, self._calls, strict=True):
            calls.append(Call(self._once.of(call.args), self._once.of(call.kwargs), call.in_args))

    @property
    def _alone(self) -> bool:
        """Whether only what follows the layers can tell the form, there being one layer."""
        return len(self.layers) == 1 and not self.capture.hidden

    def _attempt(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._calls, self._first, self._handed = [], None, None
        try:
            forward(*args, **kwargs)
        except _Stop:
            return
        if len(self._calls) < len(self.layers):
            raise StructureError(
                f"a forward ended after {len(self._calls)} of {len(self.layers)} layers",
                where=self.stack.path,
                remedy="Give the path of the decoder's layers with `layers=`.",
            )

    def _layer_called(self, index: int, *args: Any, **kwargs: Any) -> object:
        if index != len(self._calls):
            raise StructureError(
                f"layer {index} was called when layer {len(self._calls)} was due",
                where=self.stack.path,
                remedy="Layers that are skipped, shared or called twice cannot be walked.",
            )
        in_args = bool(args)
        hidden = args[0] if in_args else kwargs.get(_HIDDEN)
        if index and hidden is not self._handed:
            raise _OtherForm
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise StructureError(
                f"layer {index} is not called with a hidden state [rows tokens features]",
                where=self.stack.path,
                remedy="Name the decoder's layers with `layers=`, or give token ids [rows tokens].",
            )
        rest = {k: v for k, v in kwargs.items() if k != _HIDDEN or in_args}
        where = f"{self.stack.paths[index]}"
        for name, value in [*enumerate(args[1:], 1), *rest.items()]:
            _check_replayable(value, f"{where}, argument {name!r}")
        self._calls.append(Call(args[1:], rest, in_args))
        self._handed = hidden
        if index == 0:
            self._first = hidden
        if index == len(self.layers) - 1 and not self._alone:
            raise _Stop
        return self.capture.handed_on(hidden)

    def _broken(self, failures: list[BaseException]) -> BaseException:
        """What to say where no form of output would do."""
        if not any(isinstance(failure, _OtherForm) for failure in failures):
            return failures[0]
        index = len(self._calls)
        return StructureError(
            f"layer {index} was not handed what layer {index - 1} returned",
            where=self.stack.path,
            remedy="The model computes between its layers; a walk would leave that out.",
        )

    def _keep(self, args: Any, kwargs: Any) -> Tensor | None:
        assert self._first is not None
        given = self.signature.bind_partial(*args, **kwargs).arguments
        mask = kwargs.get("attention_mask", given.get("attention_mask"))
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.shape != self._first.shape[:2]:
            raise CalibrationError(
                "the attention mask does not say which positions are padding: expected "
                f"{tuple(self._first.shape[:2])}, found "
                f"{tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}",
                remedy="Give attention_mask as [rows tokens], 1 for tokens and 0 for padding.",
            )
        keep = mask.bool()
        return None if bool(keep.all()) else keep


class _Once:
    """Keeps equal tensors once: batches of one shape have the same rotary tables and masks, which
    one by one would outgrow the hidden states.
    """

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}
        self._known: dict[int, Any] = {}

    def forget_objects(self) -> None:
        """Between batches, when an object's id may come to stand for another object."""
        self._known.clear()

    def of(self, value: Any) -> Any:
        """The value with each tensor in it replaced by the equal one that came first."""
        if isinstance(value, dict | tuple | list | Tensor) and id(value) not in self._known:
            self._known[id(value)] = self._first_of(value)
        return self._known.get(id(value), value)

    def _first_of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            key = (tensor_hash(value), value.stride(), value.device)
            return self._kept.setdefault(key, value)
        if type(value) is dict:
            return {key: self.of(entry) for key, entry in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.of(entry) for entry in value)
        return value


def _bind(function: Callable[..., Any], first: Any) -> Callable[..., Any]:
    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(first, *args, **kwargs)

    return bound


def _check_replayable(value: Any, where: str) -> None:
    """Arguments are replayed as they are; an object with a state would change on the way."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for entry in value:
            _check_replayable(entry, where)
    elif not (value is None or isinstance(value, Tensor | bool | int | float | str | torch.dtype)):
        raise StructureError(
            f"a {type(value).__name__} is handed to the layer, which replay cannot keep",
            where=where,
            remedy="Calibrate with caches off (use_cache=False).",
        )
