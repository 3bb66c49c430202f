"""QATTrainer killed in either phase and run again: the files of a run that nothing stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import ongrid
import toy

SRC = Path(ongrid.__file__).parents[1]
LAYERS, STEPS = 3, 4

CHILD = """
    import os, signal, sys
    from pathlib import Path
    from transformers import TrainerCallback
    import test_qat

    folder, out, kind, at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    replace = os.replace
    def replacing(old, new):
        if kind == "block" and Path(new).name == f"model-layer-{at:05d}.safetensors":
            die()
        replace(old, new)
    os.replace = replacing

    class Killer(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if kind == "step" and state.global_step == at:
                die()

    saves = {"save_strategy": "steps", "save_steps": 1.0}
    run = test_qat.trainer(test_qat.plain(folder), out / "run", weight_lr=1e-3, **saves)
    run.add_callback(Killer())
    begun = any((out / "run").glob("checkpoint-*"))
    run.train(resume_from_checkpoint=True if begun else None)
    run.save_model(str(out / "merged"))
"""


def child(folder: Path, out: Path, kind: str, at: int) -> int:
    path = os.pathsep.join(map(str, (SRC, Path(__file__).parent)))
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    done = subprocess.run(
        [sys.executable, "-c", threads + textwrap.dedent(CHILD), folder, out, kind, str(at)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


@pytest.mark.alone
@pytest.mark.slow
def test_killed_in_a_random_block_and_at_a_random_step(tmp_path: Path):
    folder = toy.save(toy.build(), tmp_path / "source")
    toy.add_tokenizer(folder)
    assert child(folder, tmp_path / "whole", "never", 0) == 0
    random = torch.Generator().manual_seed(0)
    block = int(torch.randint(1, LAYERS, (), generator=random))
    step = int(torch.randint(1, STEPS, (), generator=random))
    out = tmp_path / "killed"
    assert child(folder, out, "block", block) == -signal.SIGKILL
    assert not list((out / "run").glob("checkpoint-*"))
    assert child(folder, out, "step", step) == -signal.SIGKILL
    assert not (out / "merged").exists()
    assert child(folder, out, "never", 0) == 0
    assert toy.contents(out / "merged") == toy.contents(tmp_path / "whole" / "merged")
