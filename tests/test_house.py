"""The house keeps its rules, importing it does nothing, and every check can fail."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from house import (
    CHECKS,
    REGISTRATIONS,
    Check,
    cycles,
    environment,
    file_length,
    file_names,
    function_length,
    globals_,
    handlers,
    hasattrs,
    layers,
    parameter_count,
    patches,
    pickles,
    registrations,
    registrations_elsewhere,
    stars,
    syntax,
)

pytestmark = pytest.mark.alone  # some tests here measure seconds

SRC = Path(__file__).resolve().parent.parent / "src"


def house() -> dict[str, str]:
    """All sources of the package, by path inside it."""
    return {
        file.relative_to(SRC / "ongrid").as_posix(): file.read_text(encoding="utf-8")
        for file in sorted((SRC / "ongrid").rglob("*.py"))
    }


@pytest.mark.parametrize("name", CHECKS)
def test_rule(name: str):
    found = [f for path, source in house().items() for f in CHECKS[name](path, source)]
    assert not found, f"{name}\n" + "\n".join(found)


def test_no_import_cycles():
    found = cycles(house())
    assert not found, "import cycles\n" + "\n".join(found)


@pytest.mark.parametrize(("kind", "place"), REGISTRATIONS.items())
def test_listed_registrations_exist(kind: str, place: str):
    """A line of the list that nothing uses any more is removed from it."""
    here = {path: source for path, source in house().items() if path.startswith(place)}
    kinds = {k for path, source in here.items() for _, k in registrations(path, source)}
    assert kind in kinds, f"nothing under src/ongrid/{place} registers {kind}"


@pytest.mark.usefixtures("compiler")
def test_torch_compile_can_build():
    """Tests that compile never skip: a compiler is part of the environment, see conftest.py."""


# What `import ongrid` does, in a fresh interpreter

NOT_LOADED = ["transformers", "pydantic", "yaml", "typer", "rich", "accelerate", "datasets"]

PROBE = """
import json, logging, os, random, sys, warnings
import jaxtyping, numpy, safetensors.torch, torch

def state():
    return {
        "the environment": sorted(os.environ.items()),
        "random's state": random.getstate(),
        "numpy's random state": str(numpy.random.get_state()),
        "torch's random state": torch.get_rng_state().tolist(),
        "the warning filters": [str(f) for f in warnings.filters],
        "the log handlers": [str(h) for h in logging.root.handlers],
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's thread count": torch.get_num_threads(),
        "the import path": list(sys.path),
    }

for stream in (sys.stdout, sys.stderr):
    print("before", end="", file=stream, flush=True)
before = state()
exec(sys.argv[1])
after = state()
for stream in (sys.stdout, sys.stderr):
    print("after", end="", file=stream, flush=True)
print(json.dumps({
    "changed": [what for what in before if before[what] != after[what]],
    "loaded": sorted({module.split(".")[0] for module in sys.modules}),
}))
"""


def fresh(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in (str(SRC), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def effects(statement: str) -> list[str]:
    """What running `statement` changed, loaded or printed that it may not."""
    done = fresh(PROBE, statement)
    said_out, _, rest = done.stdout.partition("before")[2].partition("after")
    said_err = done.stderr.partition("before")[2].partition("after")[0]
    report = json.loads(rest)
    found = [f"it changes {what}" for what in report["changed"]]
    found += [f"it loads {module}" for module in NOT_LOADED if module in report["loaded"]]
    found += [f"it prints {said!r}" for said in (said_out, said_err) if said]
    return found


def too_slow(seconds: list[float], seconds_torch: list[float], allowed: float = 0.3) -> str | None:
    """Compares the medians of two sets of runs."""
    ours, theirs = statistics.median(seconds), statistics.median(seconds_torch)
    if ours < theirs + allowed:
        return None
    return (
        f"import ongrid takes {ours:.2f} s, import torch alone {theirs:.2f} s; at most "
        f"{allowed} s more (runs: {seconds} against {seconds_torch})"
    )


def test_import_has_no_effects_and_loads_little():
    found = effects("import ongrid")
    assert not found, "import ongrid:\n" + "\n".join(found)


def test_import_is_as_fast_as_torch():
    timer = "import time; t = time.perf_counter(); {}; print(round(time.perf_counter() - t, 3))"
    seconds: dict[str, list[float]] = {"import ongrid": [], "import torch": []}
    for _ in range(3):  # in turns, so that a busy machine slows both
        for statement, runs in seconds.items():
            runs.append(float(fresh(timer.format(statement)).stdout))
    problem = too_slow(seconds["import ongrid"], seconds["import torch"])
    assert problem is None, problem


# Every check can fail

BAD: list[tuple[Check, str, str]] = [
    (syntax, "recipe.py", "def f(:\n"),
    (layers, "grid/grid.py", "from ongrid.nn.linear import QuantLinear\n"),
    (layers, "grid/grid.py", "from ..nn import linear\n"),
    (layers, "grid/grid.py", "import ongrid.recipe as r\n"),
    (layers, "nn/linear.py", "def f():\n    from ongrid import calibrate\n"),
    (layers, "nn/linear.py", "from ongrid.store import Artifact\n"),
    (layers, "export/gguf.py", "import ongrid.calibrate.gptq\n"),
    (layers, "nn/linear.py", "if TYPE_CHECKING:\n    from ongrid.recipe import Plan\n"),
    (layers, "nn/linear.py", "import importlib\nimportlib.import_module('ongrid.hf.load')\n"),
    (layers, "recipe.py", "from ongrid import Grid\n"),
    (layers, "recipe.py", "import ongrid\n"),
    (layers, "quantize.py", "from ongrid.hf.load import load\n"),
    (layers, "__init__.py", "from ongrid.hf import load\n"),
    (layers, "calibrate/walk.py", "def f():\n    import transformers\n"),
    (layers, "hf/load.py", "from rich.table import Table\n"),
    (layers, "tensors.py", ""),
    (stars, "nn/linear.py", "from torch.nn import *\n"),
    (file_length, "recipe.py", "x = 1\n" * 501),
    (function_length, "recipe.py", "def f():\n" + "    x = 1\n" * 80),
    (parameter_count, "recipe.py", "def f(a, b, /, c, d, *e, f, g, h, **i): ...\n"),
    (parameter_count, "recipe.py", "class A:\n    def f(self, a, b, c, d, e, f, g, h, i): ...\n"),
    (file_names, "nn/utils.py", ""),
    (file_names, "_common/linear.py", ""),
    (hasattrs, "nn/stack.py", "found = hasattr(model, 'layers')\n"),
    (hasattrs, "export/gguf.py", "ask = hasattr\n"),
    (handlers, "hf/load.py", "try: f()\nexcept Exception: pass\n"),
    (handlers, "hf/load.py", "try: f()\nexcept: pass\n"),
    (handlers, "hf/load.py", "try: f()\nexcept (OSError, BaseException) as e: log(e)\n"),
    (handlers, "hf/load.py", "try: f()\nexcept Exception:\n    if x: raise\n"),
    (handlers, "hf/load.py", "def g():\n try: f()\n except Exception:\n  if x: return\n  raise\n"),
    (handlers, "hf/load.py", "with contextlib.suppress(Exception): f()\n"),
    (globals_, "recipe.py", "def f():\n    global cache\n    cache = 1\n"),
    (environment, "hf/load.py", "import os\nos.environ['A'] = '1'\n"),
    (environment, "hf/load.py", "import os\ndel os.environ['A']\n"),
    (environment, "hf/load.py", "import os\nos.environ |= {'A': '1'}\n"),
    (environment, "hf/load.py", "import os as o\no.environ.setdefault('A', '1')\n"),
    (environment, "hf/load.py", "from os import environ\nenviron.update(A='1')\n"),
    (environment, "hf/load.py", "from os import putenv\nputenv('A', '1')\n"),
    (patches, "hf/load.py", "import torch\ntorch.backends.cudnn.enabled = False\n"),
    (patches, "hf/load.py", "import torch.nn as nn\nnn.Linear.forward = forward\n"),
    (patches, "hf/load.py", "from torch import nn\nnn.Linear, x = A, B\n"),
    (patches, "hf/load.py", "import sys\nsys.modules['torch'] = fake\n"),
    (patches, "hf/load.py", "def f():\n    import torch\n    setattr(torch, 'load', None)\n"),
    (patches, "hf/load.py", "import torch\ndel torch.load\n"),
    (pickles, "store/shards.py", "import pickle\n"),
    (pickles, "store/shards.py", "from torch import load\n"),
    (pickles, "store/shards.py", "import torch\ntorch.save(x, f)\n"),
    (pickles, "store/shards.py", "import numpy as np\nnp.load(f, allow_pickle=True)\n"),
    (registrations_elsewhere, "nn/weight.py", "@torch.library.custom_op('a::b')\ndef f(): ...\n"),
    (registrations_elsewhere, "nn/weight.py", "op.register_fake(f)\n"),
    (registrations_elsewhere, "nn/weight.py", "from torch.library import define as d\nd('a::b')\n"),
    (registrations_elsewhere, "hf/load.py", "@register_quantizer('ongrid')\nclass Q: ...\n"),
    (registrations_elsewhere, "hf/quantizer.py", "import atexit\natexit.register(f)\n"),
]  # fmt: skip

GOOD: list[tuple[Check, str, str]] = [
    (layers, "quantize.py", "def f():\n    from ongrid.hf.load import load\n"),
    (layers, "quantize.py", "if TYPE_CHECKING:\n    from ongrid.hf.load import load\n"),
    (layers, "calibrate/walk.py", "from ongrid.store.artifact import Artifact\n"),
    (layers, "grid/grid.py", "from .levels import Int\nfrom ..errors import GridError\n"),
    (layers, "_config.py", "from ongrid.errors import ConfigError\n"),
    (layers, "cli/__init__.py", "import typer\nfrom ongrid.quantize import quantize\n"),
    (file_length, "recipe.py", "x = 1\n" * 500),
    (function_length, "recipe.py", "def f():\n" + "    x = 1\n" * 79),
    (parameter_count, "recipe.py", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ...\n"),
    (hasattrs, "hf/load.py", "found = hasattr(model, 'layers')\n"),
    (hasattrs, "nn/stack.py", "found = getattr(model, 'layers', None)\n"),
    (handlers, "store/shards.py", "try: f()\nexcept BaseException:\n    g()\n    raise\n"),
    (handlers, "store/shards.py", "try: f()\nexcept OSError: pass\n"),
    (environment, "hf/load.py", "import os\nx = os.environ.get('A')\ny = dict(os.environ)\n"),
    (patches, "hf/load.py", "import torch\ndef f(torch):\n    torch.x = 1\n"),
    (patches, "hf/load.py", "import torch\nx = torch.nn.Linear(1, 1)\nx.weight = w\n"),
    (pickles, "store/shards.py", "from safetensors.torch import load, save\n"),
    (registrations_elsewhere, "grid/ops.py", "@torch.library.custom_op('a::b')\ndef f(): ...\n"),
    (registrations_elsewhere, "nn/weight.py", "self.register_buffer('scale', s)\n"),
]  # fmt: skip


def sample_id(value: object) -> str:
    return getattr(value, "__name__", str(value).strip().replace("\n", "; ")[:60])


@pytest.mark.parametrize(("check", "path", "source"), BAD, ids=sample_id)
def test_check_can_fail(check: Check, path: str, source: str):
    found = check(path, source)
    assert found, "not reported"
    assert all(f.startswith(f"src/ongrid/{path}:") for f in found)


@pytest.mark.parametrize(("check", "path", "source"), GOOD, ids=sample_id)
def test_check_reports_nothing_else(check: Check, path: str, source: str):
    assert check(path, source) == []


def test_every_check_is_shown_to_fail():
    assert set(CHECKS.values()) == {check for check, _, _ in BAD}


def test_cycles_are_found():
    found = cycles(
        {
            "grid/__init__.py": "from ongrid.grid.grid import Grid\n",
            "grid/grid.py": "def f():\n    from .qtensor import QTensor\n",
            "grid/qtensor.py": "from ongrid.grid import bits, Grid\n",
            "grid/bits.py": "import ongrid.errors\n",
            "errors.py": "",
        }
    )
    assert [f.split(":")[0].rpartition("/")[2] for f in found] == [
        "__init__.py",
        "grid.py",
        "qtensor.py",
    ]
    assert cycles({"a.py": "from ongrid.b import x\n", "b.py": "import torch\n"}) == []


def test_effects_are_found():
    statement = """
import os, random, sys, warnings, yaml
os.environ["A"] = "1"; random.random(); warnings.simplefilter("ignore"); torch.rand(1)
print("welcome"); print("beware", file=sys.stderr)
"""
    assert effects(statement) == [
        "it changes the environment",
        "it changes random's state",
        "it changes torch's random state",
        "it changes the warning filters",
        "it loads yaml",
        "it prints 'welcome\\n'",
        "it prints 'beware\\n'",
    ]


def test_slowness_is_found():
    assert too_slow([1.0, 1.4, 9.0], [1.0, 1.0, 1.0])
    assert too_slow([9.0, 1.2, 1.0], [1.0, 1.0, 9.0]) is None
