"""How the C library keeps memory while a model passes through layer by layer.

Peak memory is promised not to grow with a model's depth, and what lives does not. But glibc's heap
does two things that a walk suffers from, and both can be told otherwise while it lasts:

- It hands the end of the heap back as soon as some dozens of megabytes are free there, and fetches
  it again for the next layer: on a small model that is a quarter of the time of a forward. Within
  `steady_heap` it keeps them.
- A model that is built to be thrown away, parameter by parameter, leaves holes as long as the model
  in the heap. They cost nothing until a later block wanders into them, and then peak memory grows
  layer by layer. Within `clean_heap` large blocks are mapped for themselves, and leave nothing.

Elsewhere than under glibc all of this does nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_MIB = 2**20
# Where glibc's own adaptation ends after the first large block has been freed. It cannot be
# switched on again once a threshold was set, so this is what is left behind.
_USUAL = {_MMAP_THRESHOLD: 32 * _MIB, _TRIM_THRESHOLD: 64 * _MIB}


@contextmanager
def steady_heap() -> Iterator[None]:
    """Within the context freed memory stays with the process; then it is given back."""
    try:
        with _thresholds({**_USUAL, _TRIM_THRESHOLD: 2**31 - 1}):
            yield
    finally:
        _give_back()


@contextmanager
def clean_heap() -> Iterator[None]:
    """Within the context large blocks do not come from the heap, and so leave no holes there."""
    with _thresholds({_MMAP_THRESHOLD: _MIB // 8}):
        yield


def _give_back() -> None:
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


@contextmanager
def _thresholds(values: dict[int, int]) -> Iterator[None]:
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        yield
        return
    for name, value in values.items():
        mallopt(name, value)
    try:
        yield
    finally:
        for name in values:
            mallopt(name, _USUAL[name])


@functools.cache
def _of_glibc(name: str) -> Callable[..., Any] | None:
    """A function that glibc alone has in this form (`malloc_trim` tells it from others)."""
    try:
        library = ctypes.CDLL(None)
        return getattr(library, name) if library.malloc_trim else None
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return None
