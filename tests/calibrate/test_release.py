"""What replay makes of layers that are not as plain as they should be, and what it lets go of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import toy
from ongrid.calibrate.capture import Call, Capture, capture
from ongrid.calibrate.chain import Chain
from ongrid.calibrate.data import read_calls, run_all
from ongrid.calibrate.replay import AbstractReduction, Replay
from ongrid.errors import StructureError
from ongrid.nn import find_stack


class Numbered(AbstractReduction):
    """Keeps all it is given."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def update(self, x: Tensor) -> None:
        self.rows.append(x.clone())


def replay_of(batches: int) -> tuple[Replay, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(1, 3, 4, generator=generator) for _ in range(batches)]
    calls = [[Call((), {}, True) for _ in hidden]]
    return Replay(Capture(Chain(hidden), calls, [None] * batches), "float"), hidden


class Overwriting(nn.Module):
    """Adds to its own input: a second run would start from the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.add_(self.proj(hidden_states))


@pytest.mark.parametrize("act", ["observe", "settle", "advance"])
def test_a_layer_that_overwrites_its_input_is_refused(act: str):
    replay, _ = replay_of(1)
    replay.propagate = "quantized" if act == "advance" else "float"
    layer = Overwriting()
    acts: dict[str, Callable[[], object]] = {
        "observe": lambda: replay.observe(layer, ["proj"], Numbered, activations=True),
        "settle": lambda: replay.settle(layer),
        "advance": lambda: replay.advance(layer),
    }
    with pytest.raises(StructureError, match="the layer overwrites its input") as caught:
        acts[act]()
    assert caught.value.remedy


class Calling(nn.Module):
    """Calls its linear in a given way."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.proj = nn.Bilinear(4, 4, 4) if call is with_two else nn.Linear(4, 4)
        self.call = call

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.call(self.proj, hidden_states)


def with_two(proj: nn.Module, h: Tensor) -> Tensor:
    return proj(h, input2=h)


def test_a_linear_may_be_called_with_a_keyword():
    replay, hidden = replay_of(1)
    layer = Calling(lambda proj, h: proj(input=h))
    found = replay.observe(layer, ["proj"], Numbered, activations=True)
    assert torch.equal(found["proj"].rows[0], hidden[0][0])


def test_a_module_with_two_inputs_is_refused():
    replay, _ = replay_of(1)
    with pytest.raises(StructureError, match=r"^proj: is called with 2 tensors, not one"):
        replay.observe(Calling(with_two), ["proj"], Numbered, activations=True)


# ---- what is let go of ------------------------------------------------------------------------


class Watching(nn.Module):
    """Counts, whenever it runs, which of the tensors that it knows are alive."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = [weakref.ref(tensor) for tensor in known]
        self.alive: list[int] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.alive.append(sum(ref() is not None for ref in self.known))
        return hidden_states + 1


@pytest.mark.parametrize("resumed", [True, False])
def test_an_input_goes_as_soon_as_it_is_replaced(resumed: bool):
    replay, hidden = replay_of(4)
    kept = {str(i): h.clone() for i, h in enumerate(hidden)} if resumed else None
    replay.enter(0, kept)
    layer = Watching(replay.hidden)
    replay.propagate = "quantized"
    del hidden, kept
    replay.advance(layer)
    assert layer.alive == [4, 3, 2, 1]


def test_calls_of_a_finished_layer_are_let_go_of():
    model = toy.build()
    found = capture(model, find_stack(model), run_all(read_calls(model, toy.batches(2))))
    Replay(found, "float").enter(2)
    assert [len(calls) for calls in found.calls] == [0, 0, 2]
