"""Chains: hidden states in memory under a budget, and in a file beyond it."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ongrid
import toy
from ongrid.calibrate.capture import capture
from ongrid.calibrate.chain import Chain
from ongrid.calibrate.data import read_calls, run_all
from ongrid.errors import StoreError
from ongrid.nn import find_stack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def batch(rows: int, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, 4, generator=generator).to(dtype)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=6),
    st.integers(0, 400) | st.none(),
    st.sampled_from(DTYPES),
)
def test_what_is_read_is_what_was_put_there(
    sizes: list[tuple[int, int]], budget: int | None, dtype: torch.dtype
):
    batches = [batch(*size, seed, dtype) for seed, size in enumerate(sizes)]
    chain = Chain(batches, budget=budget)
    for again in range(2):
        assert len(chain) == len(batches)
        assert chain.shapes() == [tuple(b.shape) for b in batches]
        for found, expected in zip(chain, batches, strict=True):
            assert found.dtype == dtype and torch.equal(found, expected)
        batches = [b + 1 + again for b in batches]
        for index, b in enumerate(batches):
            chain[index] = b


def test_a_batch_of_another_size_may_take_a_place():
    chain = Chain([batch(2, 3, 0), batch(2, 3, 1)], budget=0)
    chain[0] = batch(3, 5, 2)
    assert torch.equal(chain[0], batch(3, 5, 2)) and torch.equal(chain[1], batch(2, 3, 1))


def test_strided_tensors_are_kept_by_their_values():
    x = batch(2, 6, 0).transpose(0, 1)
    assert torch.equal(Chain([x], budget=0)[0], x)


def test_memory_is_used_up_to_the_budget_and_no_name_is_left(tmp_path: Path):
    one = batch(2, 3, 0)
    chain = Chain([one, one.clone(), one.clone()], budget=2 * one.nbytes, folder=tmp_path)
    assert [isinstance(held, Tensor) for held in chain._held] == [True, True, False]
    assert not list(tmp_path.iterdir())


def test_the_file_goes_with_the_chain(tmp_path: Path):
    chain = Chain([batch(2, 3, 0)], budget=0, folder=tmp_path)
    file: Any = chain._file
    number = file.fileno()
    assert os.fstat(number).st_nlink == 0
    del chain
    gc.collect()
    assert file.closed


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left") as caught:
        Chain([batch(1, 2, 0)], budget=0, folder=tmp_path)
    assert str(tmp_path) in str(caught.value) and "Make room" in str(caught.value)


def test_writes_that_come_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """A system call may take less than it was given."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: pwrite(f, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda f, into, at: preadv(f, [into[0][:5]], at))
    x = batch(2, 3, 0)
    assert torch.equal(Chain([x], budget=0)[0], x)


@pytest.mark.parametrize("algorithm", ["block_ap", "signround:iters=6"])
def test_training_holds_a_batch_at_a_time(algorithm: str, monkeypatch: pytest.MonkeyPatch):
    """However many there are: an input and a target while a step needs them."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0
    read = Chain._read

    def spied(self: Chain, slot: Any) -> Tensor:
        nonlocal most
        found = read(self, slot)
        alive.add(found)
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(Chain, "_read", spied)
    ongrid.quantize(
        toy.build(), toy.recipe("int2.16.code.fp16"), toy.batches(9), algorithm=algorithm
    )
    assert 2 <= most <= 3


def test_equal_masks_and_tables_are_kept_once():
    """Batches of one shape share what they are called with, bit for bit and object for object."""
    for attention in ("sdpa", "eager"):
        model = toy.build("gemma3", attention=attention)
        calls = read_calls(model, [*toy.batches(3), toy.batches(1, tokens=7)[0]])
        found = capture(model, find_stack(model), run_all(calls))
        for of_layer in found.calls:
            objects = [_tensors((call.args, call.kwargs)) for call in of_layer]
            assert objects[0] and [id(t) for t in objects[0]] == [id(t) for t in objects[2]]
            assert not {id(t) for t in objects[0]} & {id(t) for t in objects[3]}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for entry in value for t in _tensors(entry)] if isinstance(value, tuple) else []
