"""The C library is told how to keep memory for as long as a walk lasts, and nobody else is."""

from __future__ import annotations

import ctypes
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ongrid.store import memory

_USUAL = [(memory._MMAP_THRESHOLD, 32 << 20), (memory._TRIM_THRESHOLD, 64 << 20)]


@pytest.fixture(autouse=True)
def looked_up_anew() -> Iterator[None]:
    memory._of_glibc.cache_clear()
    yield
    memory._of_glibc.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a stand-in for the C library was asked to do."""
    calls: list[object] = []

    class Library:
        def __init__(self, name: object) -> None: ...

        @staticmethod
        def malloc_trim(pad: int) -> int:
            calls.append("trim")
            return 1

        @staticmethod
        def mallopt(name: int, value: int) -> int:
            calls.append((name, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    return calls


def test_a_steady_heap_keeps_memory_and_gives_it_back_at_the_end(asked: list[object]):
    with memory.steady_heap():
        assert asked == [(memory._MMAP_THRESHOLD, 32 << 20), (memory._TRIM_THRESHOLD, 2**31 - 1)]
        asked.clear()
    assert asked == [*_USUAL, "trim"]


def test_a_clean_heap_takes_no_large_block(asked: list[object]):
    with memory.clean_heap():
        assert asked == [(memory._MMAP_THRESHOLD, 128 << 10)]
        asked.clear()
    assert asked == [_USUAL[0]]


def test_both_end_with_an_error_too(asked: list[object]):
    for context, left in ((memory.steady_heap, [*_USUAL, "trim"]), (memory.clean_heap, _USUAL[:1])):
        with pytest.raises(KeyError), context():
            asked.clear()
            raise KeyError
        assert asked == left


@pytest.mark.parametrize("failure", [AttributeError, OSError, TypeError])
def test_a_library_without_it_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
):
    def refuse(name: object) -> None:
        raise failure

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with memory.steady_heap(), memory.clean_heap():
        pass


_FETCHES = """
import resource, sys, torch
from ongrid.store.memory import steady_heap
from contextlib import nullcontext
def work():
    blocks = [torch.ones(12 << 20, dtype=torch.uint8) for _ in range(8)]
with steady_heap() if sys.argv[1] == "steady" else nullcontext():
    work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        work()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told")
def test_memory_that_is_used_again_is_not_fetched_again():
    def fetched(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _FETCHES, how], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    steady, plain = fetched("steady"), fetched("plain")
    one_round = 8 * (12 << 20) // resource.getpagesize()
    assert steady < one_round < plain
