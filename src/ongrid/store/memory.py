"""Freed memory goes back to the system, where the C library would keep it.

Peak memory is promised not to grow with a model's depth, and what lives does not. But glibc keeps
freed blocks, and the holes between live ones grow for dozens of layers: by 4 MB a layer on a model
of width 576, more than half a layer. Giving everything back after every batch costs a quarter of
the time, since the memory is fetched again at once. So the first layer sets a level, and memory is
given back only when a later batch ends above it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

_RESIDENT = Path("/proc/self/statm")


class Level:
    """Keeps the resident memory of this process near the level that it once had."""

    def __init__(self) -> None:
        self.bytes = 0

    def learn(self) -> None:
        """Raises the level to what is resident now."""
        self.bytes = max(self.bytes, resident_bytes())

    def hold(self) -> None:
        """Gives freed memory back if more than the level is resident."""
        trim = _malloc_trim()
        if trim is not None and resident_bytes() > self.bytes:
            trim(0)


def resident_bytes() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    try:
        return int(_RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc: musl, macOS, Windows
        return None
