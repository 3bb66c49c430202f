"""Memory goes back where the C library can and it is needed, and nothing happens elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ongrid.store import memory


@pytest.fixture(autouse=True)
def looked_up_anew() -> Iterator[None]:
    memory._malloc_trim.cache_clear()
    yield
    memory._malloc_trim.cache_clear()


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a stand-in for the C library was asked to trim."""
    calls: list[int] = []

    class Library:
        def __init__(self, name: object) -> None: ...

        @staticmethod
        def malloc_trim(pad: int) -> int:
            calls.append(pad)
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    return calls


def test_memory_goes_back_only_above_the_level(monkeypatch: pytest.MonkeyPatch, trims: list[int]):
    level = memory.Level()
    for resident, learnt in ((100, True), (300, True), (200, True), (300, False), (301, False)):
        monkeypatch.setattr(memory, "resident_bytes", lambda resident=resident: resident)
        if learnt:
            level.learn()
        else:
            level.hold()
    assert level.bytes == 300
    assert trims == [0]


@pytest.mark.parametrize("failure", [AttributeError, OSError, TypeError])
def test_a_library_without_it_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
):
    def refuse(name: object) -> None:
        raise failure

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    memory.Level().hold()


def test_a_system_that_does_not_say_is_never_above(
    monkeypatch: pytest.MonkeyPatch, trims: list[int], tmp_path: Path
):
    monkeypatch.setattr(memory, "_RESIDENT", tmp_path / "absent")
    memory.Level().hold()
    assert memory.resident_bytes() == 0
    assert trims == []


def test_resident_bytes_see_a_tensor():
    before = memory.resident_bytes()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    assert memory.resident_bytes() - before > 48 << 20
    assert block[0] == 1
