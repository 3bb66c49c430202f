"""What matrix products are given, and how many there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.factors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.factors.append(args[-1].clone())
        return func(*args, **(kwargs or {}))


@contextmanager
def products() -> Iterator[list[Tensor]]:
    """The second factor of every matrix product within the context, below autocast."""
    with _Products() as mode:
        yield mode.factors
