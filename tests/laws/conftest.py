"""What compiled tests run under."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch


@pytest.fixture
def traceable() -> Iterator[None]:
    """Shape checks off: dynamo cannot trace beartype, and a user's process has none to trace."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    jaxtyping.config.update("jaxtyping_disable", False)
