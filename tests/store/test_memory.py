"""Memory goes back where the C library can, and nothing happens where it cannot."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from ongrid.store import memory


@pytest.fixture(autouse=True)
def looked_up_anew() -> Iterator[None]:
    memory._malloc_trim.cache_clear()
    yield
    memory._malloc_trim.cache_clear()


def test_the_c_library_is_asked_once_and_called_every_time(monkeypatch: pytest.MonkeyPatch):
    calls: list[object] = []

    class Library:
        def __init__(self, name: object) -> None:
            calls.append("opened")

        @staticmethod
        def malloc_trim(pad: int) -> int:
            calls.append(pad)
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    memory.give_back()
    memory.give_back()
    assert calls == ["opened", 0, 0]


@pytest.mark.parametrize("failure", [AttributeError, OSError, TypeError])
def test_a_library_without_it_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
):
    def refuse(name: object) -> None:
        raise failure

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    memory.give_back()
