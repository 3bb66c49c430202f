"""What every test runs under: no network, checked shapes, known thread counts."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

# Every jaxtyping shape in ongrid is checked at run time. Must come before the first import of it.
install_import_hook("ongrid", "beartype.beartype")

if "OMP_NUM_THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def why_not_compile() -> str | None:
    """What `torch.compile` on a CPU lacks on this machine, and what to do; None if nothing."""
    command = os.environ.get("CXX", "g++")
    if shutil.which(command) is None:
        return (
            f"no C++ compiler: {command!r} is not on PATH. torch.compile needs one. "
            "Install g++ (Debian: apt-get install g++), or set CXX."
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return (
            f"no {header}. torch.compile includes it. "
            "Install Python's headers (Debian: apt-get install python3-dev)."
        )
    return None


@pytest.fixture(scope="session")
def compiler() -> None:
    """For tests that call `torch.compile`: without a compiler they fail and say so."""
    if problem := why_not_compile():
        pytest.fail(problem, pytrace=False)


@pytest.fixture(autouse=True)
def _compiler_for_compile_tests(request: pytest.FixtureRequest) -> None:
    """Any test with "compile" in its name or parameters has asked for `compiler`."""
    if "compile" in request.node.name:
        request.getfixturevalue("compiler")
