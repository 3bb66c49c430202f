"""Eval mode for as long as a context lasts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Within the context every module is in eval mode; afterwards each is in its own mode again.

    Modules that were put in meanwhile are then in the mode of their whole model.
    """
    # Weak: a module that is dropped or replaced meanwhile must not keep its memory.
    modes = weakref.WeakKeyDictionary({m: m.training for model in models for m in model.modules()})
    wholes = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, whole in zip(models, wholes, strict=True):
            model.train(whole)
        for module, own in modes.items():
            module.training = own
