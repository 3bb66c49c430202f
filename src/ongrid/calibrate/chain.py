"""Chain: the hidden states of all batches between two decoder layers, in memory or in a file."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ongrid.errors import StoreError


@dataclass(frozen=True)
class _Slot:
    """Where a batch lies in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Chain:
    """Hidden states `[rows tokens features]`, batch by batch.

    What exceeds `budget` bytes (None: nothing does) lies in a file without a name in `folder`, by
    default the system's folder for temporary files. The file vanishes with the process, however
    that ends. A layer keeps the shape of a hidden state, so its output takes the place of its
    input. Law: what is read has the bits, dtype and device of what was put there. Raises
    `StoreError` where the disk refuses.
    """

    def __init__(
        self,
        batches: Iterable[Tensor] = (),
        *,
        budget: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._budget = budget
        self._folder = folder
        self._held: list[Tensor | _Slot] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._end = 0
        for batch in batches:
            self.append(batch)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Float[Tensor, "rows tokens features"]:
        held = self._held[index]
        return self._read(held) if isinstance(held, _Slot) else held

    def __setitem__(self, index: int, batch: Float[Tensor, "rows tokens features"]) -> None:
        held = self._held[index]
        if not isinstance(held, _Slot):
            self._bytes += batch.nbytes - held.nbytes
            self._held[index] = batch
        else:
            fits = (held.shape, held.dtype) == (batch.shape, batch.dtype)
            self._held[index] = self._write(batch, held.offset if fits else None)

    def append(self, batch: Float[Tensor, "rows tokens features"]) -> None:
        """Takes in one more batch."""
        if self._budget is None or self._bytes + batch.nbytes <= self._budget:
            self._bytes += batch.nbytes
            self._held.append(batch)
        else:
            self._held.append(self._write(batch, None))

    def fresh(self, batches: Iterable[Tensor] = ()) -> Chain:
        """Another chain that keeps its batches in the same way."""
        return Chain(batches, budget=self._budget, folder=self._folder)

    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each batch; none is read."""
        return [tuple(held.shape) for held in self._held]

    def _write(self, batch: Tensor, offset: int | None) -> _Slot:
        if offset is None:
            offset = self._end
            self._end += batch.nbytes
        data = batch.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (lives as we do)
                weakref.finalize(self, self._file.close)
            _write_all(self._file.fileno(), data, offset)
        except OSError as error:
            raise self._refused("written", error) from error
        return _Slot(offset, batch.shape, batch.dtype, batch.device)

    def _read(self, slot: _Slot) -> Tensor:
        assert self._file is not None
        data = torch.empty(slot.nbytes, dtype=torch.uint8)
        try:
            _read_all(self._file.fileno(), data.numpy().data, slot.offset)
        except OSError as error:
            raise self._refused("read", error) from error
        return data.view(slot.dtype).reshape(slot.shape).to(slot.device)

    def _refused(self, done: str, error: OSError) -> StoreError:
        return StoreError(
            f"hidden states cannot be {done}: {error.strerror or error}",
            where=str(self._folder or tempfile.gettempdir()),
            remedy="Make room there: one copy of the calibration set's hidden states, or two where "
            "an algorithm trains.",
        )


def _write_all(file: int, data: memoryview[Any], offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _read_all(file: int, data: memoryview[Any], offset: int) -> None:
    while data:
        read = os.preadv(file, [data], offset)
        if not read:
            raise OSError("the file is shorter than what was written")
        data, offset = data[read:], offset + read
