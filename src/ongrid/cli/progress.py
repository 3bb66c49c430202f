"""Progress of a walk: a bar on a terminal, a line per layer in a log, and always an ETA."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ongrid.quantize import OnProgress
from ongrid.quantize import Progress as Step


@contextmanager
def shown(console: Console, title: str) -> Iterator[OnProgress]:
    """Shows what a walk reports until the context ends."""
    if console.is_terminal:
        with _bar(console, title) as on_progress:
            yield on_progress
    else:
        yield _lines(console, title)


class _Eta:
    """Seconds left, from the pace of the layers done in this run; a resumed run starts anew."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.first: int | None = None

    def left(self, step: Step) -> float | None:
        if self.first is None:
            self.first = step.segment
        done = step.segment - self.first + (step.phase == "done")
        if not done:
            return None
        return (time.monotonic() - self.begun) / done * (step.segments - self.first - done)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


@contextmanager
def _bar(console: Console, title: str) -> Iterator[OnProgress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[phase]}"),
        TimeElapsedColumn(),
        TextColumn("left {task.fields[left]}"),
    )
    eta = _Eta()
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(title, total=None, phase="", left="--:--")

        def on_progress(step: Step) -> None:
            left = _clock(eta.left(step))
            completed = step.segment + (step.phase == "done")
            bars.update(task, total=step.segments, completed=completed, phase=step.phase, left=left)

        yield on_progress


def _lines(console: Console, title: str) -> OnProgress:
    eta = _Eta()

    def on_progress(step: Step) -> None:
        left = eta.left(step)
        if step.phase == "done":
            console.print(
                f"{title}: {step.segment + 1}/{step.segments}, left {_clock(left)}",
                highlight=False,
                soft_wrap=True,
            )

    return on_progress
