"""Two processes train what one does with twice the accumulation, to the last bit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ongrid
import toy
from laws.table import assert_same
from ongrid.tune.method import attach, parameter_groups

STEPS = 3
METHODS: dict[str, ongrid.AbstractMethod] = {
    "peqa": ongrid.Peqa(zeros=True, lr=1e-2),
    "qalora": ongrid.QaLora(rank=4, alpha=8.0, lr=2e-2),
}

WORKER = """
import sys, torch
import ongrid, test_distributed, toy
from torch.nn.parallel import DistributedDataParallel
rank, address, name, out = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
model, optimizer = test_distributed.begun(test_distributed.METHODS[name])
ddp = DistributedDataParallel(model)
for step in range(test_distributed.STEPS):
    ids = test_distributed.rows(step, rank)
    ddp(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    ongrid.save_state(model, out)
torch.distributed.destroy_process_group()
"""


def begun(method: ongrid.AbstractMethod) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = toy.build()
    ongrid.quantize(model, toy.recipe("int4.32.code.fp16"))
    attach(model, method)
    return model.train(), torch.optim.AdamW(parameter_groups(model, method))


def rows(step: int, rank: int) -> torch.Tensor:
    return toy.ids(2, 12, seed=2 * step + rank)


@pytest.mark.parametrize("name", METHODS)
def test_two_processes_are_one_with_twice_the_accumulation(name: str, tmp_path: Path):
    """Half a sum and a sum of halves are the same float32 number: 2 is a power of two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    out = tmp_path / "state.safetensors"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), address, name, str(out)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, optimizer = begun(METHODS[name])
        for step in range(STEPS):
            for rank in range(2):
                ids = rows(step, rank)
                (model(input_ids=ids, labels=ids).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_num_threads(threads)
    other, _ = begun(METHODS[name])
    ongrid.load_state(other, out)
    found = dict(other.named_parameters())
    for parameter, tensor in model.named_parameters():
        assert_same(found[parameter], tensor.detach())
