"""A step that moves nothing is noticed, one that is skipped is waited for, and a healthy one is
let through.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

import toy
from ongrid.errors import OngridError, Problems, TrainingError
from ongrid.hf.movement import fingerprint
from ongrid.hf.trainer import FirstStepMustMoveParams

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
          torch.int8, torch.int64, torch.bool, torch.complex64)  # fmt: skip


# Fingerprints


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bit_of_any_element_changes_the_fingerprint(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 2, (7, 5), generator=generator).to(dtype)
    seen = {fingerprint(tensor)}
    for byte in range(bits(tensor).numel()):
        for bit in range(1 if dtype == torch.bool else 8):
            bits(tensor)[byte] ^= 1 << bit
            seen.add(fingerprint(tensor))
            bits(tensor)[byte] ^= 1 << bit
    assert len(seen) == 1 + bits(tensor).numel() * (1 if dtype == torch.bool else 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_changes_of_many_elements_do_not_cancel(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(512, generator=generator).to(dtype)
    changed = [-tensor, tensor.flip(0), tensor.roll(1), tensor + 1, tensor * 2, tensor.sort()[0]]
    for pair in range(0, 512, 2):
        signs = torch.ones(512).to(dtype)
        signs[pair : pair + 2] = -1
        changed.append(tensor * signs)
        swapped = tensor.clone()
        swapped[pair : pair + 2] = tensor[pair : pair + 2].flip(0)
        changed.append(swapped)
    assert len({fingerprint(tensor), *map(fingerprint, changed)}) == 1 + len(changed)


def test_a_fingerprint_looks_at_every_chunk_and_at_nothing_but_the_bits(
    monkeypatch: pytest.MonkeyPatch,
):
    tensor = torch.randn(40, 25, generator=torch.Generator().manual_seed(0))
    whole = fingerprint(tensor)
    assert fingerprint(nn.Parameter(tensor.T.contiguous().T)) == whole
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(0, 3))
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))
    monkeypatch.setattr("ongrid.hf.movement._CHUNK", 64)
    before = fingerprint(tensor)
    for at in range(0, 1000, 63):
        tensor.view(-1)[at] += 1
        assert fingerprint(tensor) != before
        tensor.view(-1)[at] -= 1
    assert fingerprint(torch.cat([tensor[20:], tensor[:20]])) != before


# The callback, step by step


@functools.cache
def arguments() -> TrainingArguments:
    return TrainingArguments(output_dir="unused", report_to=[], use_cpu=True)


class Run:
    """The events of a training loop around an optimizer."""

    def __init__(self, optimizer: Any, model: nn.Module, max_steps: int = 100) -> None:
        self.args = arguments()
        self.state, self.control = TrainerState(max_steps=max_steps), TrainerControl()
        self.told: dict[str, Any] = {"model": model, "optimizer": optimizer}
        self.callback = FirstStepMustMoveParams()
        self.tell("on_train_begin")

    def tell(self, event: str) -> None:
        getattr(self.callback, event)(self.args, self.state, self.control, **self.told)

    def step(self, act: Callable[[], object], before: Callable[[], object] = lambda: None) -> None:
        """One optimizer step; `before` happens within the backward pass."""
        self.tell("on_step_begin")
        before()
        self.tell("on_pre_optimizer_step")
        act()
        self.tell("on_optimizer_step")
        self.state.global_step += 1
        self.tell("on_step_end")

    def end(self) -> None:
        self.tell("on_train_end")


class Stub:
    """An optimizer that is asked for nothing but what accelerate's has."""

    def __init__(self, groups: Iterable[dict[str, Any]], **attributes: Any) -> None:
        self.param_groups = list(groups)
        self.__dict__.update(attributes)


class Scaler:
    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


def linear(count: int = 1) -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


def groups(model: nn.Module, *lrs: float) -> list[dict[str, Any]]:
    """One group a layer."""
    return [
        {"params": [*layer.parameters()], "lr": lr}
        for layer, lr in zip(model.children(), lrs, strict=True)
    ]


def nothing() -> None:
    pass


def moved(model: nn.Module, layer: int = 0) -> Callable[[], None]:
    """Changes one element by its last bit."""

    def act() -> None:
        weight = model.get_submodule(str(layer)).get_parameter("weight")
        weight.data.view(torch.int32)[1, 2] ^= 1

    return act


def fed(model: nn.Module, value: float = 1.0, layers: Iterable[int] = (0,)) -> None:
    for layer in layers:
        for p in model.get_submodule(str(layer)).parameters():
            p.grad = torch.full_like(p, value)


def test_a_step_that_moves_one_bit_is_a_step_and_later_ones_are_free():
    model = linear()
    run = Run(Stub(groups(model, 1e-3)), model)
    run.step(moved(model))
    run.step(nothing)
    run.end()


def test_a_step_that_moves_nothing_is_stopped_with_its_reason():
    model = linear()
    for prepare, why, remedy in (
        (lambda: fed(model), "although gradients arrived", "fp32 masters"),
        (lambda: fed(model, 0.0), "every gradient was 0", "loss"),
        (model.zero_grad, "no gradient arrived", "detached"),
    ):
        prepare()
        run = Run(Stub([{**groups(model, 1e-3)[0], "name": "grid"}]), model)
        with pytest.raises(TrainingError, match=why) as caught:
            run.step(nothing)
        assert remedy in caught.value.remedy
        assert caught.value.where == "optimizer group 0 (grid)"
        assert "0.weight, 0.bias" in caught.value.what and "0.001" in caught.value.what


def test_every_group_must_move():
    model = linear(3)
    fed(model, layers=(0, 1, 2))
    run = Run(Stub(groups(model, 1e-3, 1e-3, 1e-3)), model)
    with pytest.raises(Problems) as caught:
        run.step(moved(model, 1))
    assert [p.where for p in caught.value.problems] == ["optimizer group 0", "optimizer group 2"]


def test_a_group_is_judged_at_the_first_step_of_its_own():
    model = linear(2)
    fed(model, layers=(0, 1))
    optimizer = Stub(groups(model, 1e-3, 0.0))
    run = Run(optimizer, model)
    run.step(moved(model, 0))
    run.step(moved(model, 0))
    optimizer.param_groups[1]["lr"] = 1e-3
    with pytest.raises(TrainingError, match="group 1"):
        run.step(moved(model, 0))


def test_warming_up_from_nothing_is_waited_for():
    model = linear()
    optimizer = Stub(groups(model, 0.0))
    run = Run(optimizer, model)
    for _ in range(3):
        run.step(nothing)
    optimizer.param_groups[0]["lr"] = 1e-3
    fed(model)
    with pytest.raises(TrainingError, match="although"):
        run.step(nothing)
    run.step(moved(model))
    run.end()


def test_frozen_parameters_do_not_count():
    model = linear(2)
    model[1].requires_grad_(False)
    run = Run(Stub(groups(model, 1e-3, 1e-3)), model)
    run.step(moved(model))
    run.end()
    run = Run(Stub(groups(model.requires_grad_(False), 1e-3, 1e-3)), model)
    run.step(moved(model))
    with pytest.raises(TrainingError, match="none counted"):
        run.end()


def test_gradients_of_exactly_zero_excuse_a_group_beside_one_that_moves():
    """The A of an adapter gets none in the first step, since B is 0."""
    model = linear(2)
    run = Run(Stub(groups(model, 1e-3, 1e-3)), model)
    fed(model), fed(model, 0.0, layers=[1])
    run.step(moved(model, 0))
    fed(model, 1.0, layers=[1])
    with pytest.raises(TrainingError, match=r"group 1: .*although gradients arrived"):
        run.step(nothing)
    run = Run(Stub(groups(model, 1e-3, 1e-3)), model)
    fed(model, 0.0, layers=[1])
    run.step(moved(model, 0))
    run.step(moved(model, 1))
    run.end()
    run = Run(Stub(groups(model, 1e-3, 1e-3)), model)
    run.step(moved(model, 0))
    with pytest.raises(TrainingError, match=r"group 1: .*every gradient was 0"):
        run.end()


def test_empty_groups_and_tensors_are_not_judged():
    """What other processes hold: FSDP leaves some of them nothing of a tensor."""
    model = linear()
    hollow = nn.Parameter(torch.zeros(0))
    every = [{"params": [], "lr": 1.0}, {"params": [hollow], "lr": 1.0}, *groups(model, 1e-3)]
    run = Run(Stub(every), model)
    run.step(moved(model))
    run.end()


def test_where_the_optimizer_shows_nothing_the_model_is_watched():
    """ZeRO-3: the optimizer's groups are empty between steps, and so are the parameters."""
    model = linear()
    for p in model.parameters():
        p.ds_tensor = p.data.clone()
        p.data = torch.zeros(0)
    run = Run(Stub([{"params": [], "lr": 1e-3}]), model)
    with pytest.raises(TrainingError, match="the whole model"):
        run.step(nothing)
    run = Run(Stub([{"params": [], "lr": 1e-3}]), model)
    run.step(lambda: model[0].weight.ds_tensor.add_(1))
    run.end()


# Skipped steps


def test_a_flagged_skip_is_waited_for():
    """Non-fused AMP, and DeepSpeed, which steps in the backward pass and has no scaler."""
    model = linear()
    optimizer = Stub(groups(model, 1e-3), step_was_skipped=True)
    run = Run(optimizer, model)
    run.step(nothing)
    run.step(nothing)
    optimizer.step_was_skipped = False
    run.step(nothing, before=moved(model))
    run.end()


def test_a_scale_that_drops_is_a_skip_without_a_flag():
    model = linear()
    scaler = Scaler()
    run = Run(Stub(groups(model, 1e-3), step_was_skipped=False, scaler=scaler), model)
    run.step(lambda: setattr(scaler, "scale", scaler.scale / 2))
    run.step(lambda: setattr(scaler, "scale", scaler.scale / 2))
    fed(model)
    with pytest.raises(TrainingError, match="although"):
        run.step(nothing)


def test_a_scale_that_grows_is_no_skip():
    model = linear()
    scaler = Scaler()
    run = Run(Stub(groups(model, 1e-3), step_was_skipped=False, scaler=scaler), model)
    with pytest.raises(TrainingError, match="no gradient"):
        run.step(lambda: setattr(scaler, "scale", scaler.scale * 2))


def test_skips_throughout_are_told_at_the_end():
    model = linear()
    run = Run(Stub(groups(model, 1e-3), step_was_skipped=True), model)
    run.step(nothing)
    run.step(nothing)
    with pytest.raises(TrainingError, match=r"after 2 optimizer steps .* 2 were skipped .* 0 had"):
        run.end()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_real_scalers_and_optimizers_show_their_skips(fused: bool):
    """Accelerate's own wrapper: an overflow, then a healthy step, then none of any effect."""
    model = linear()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    arguments()  # making them forgets accelerate's state, which the wrapper asks for
    Accelerator(cpu=True)
    optimizer = AcceleratedOptimizer(plain, scaler=scaler)
    run = Run(optimizer, model)

    def backward(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum() * factor).backward()

    before = [p.detach().clone() for p in model.parameters()]
    run.step(optimizer.step, before=lambda: backward(float("inf")))
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.step_was_skipped is not fused  # the flag alone would not do
    run.step(optimizer.step, before=lambda: backward(1.0))
    assert not any(map(torch.equal, before, model.parameters()))
    run.end()
    run = Run(optimizer, model)
    plain.param_groups[0]["lr"] = 1e-30
    with pytest.raises(TrainingError, match="although gradients arrived"):
        run.step(optimizer.step, before=lambda: backward(1.0))


# Between processes

WORKER = """
import sys, torch
from test_movement import Run, Stub, groups, linear, moved, nothing
from ongrid.errors import TrainingError
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
model = linear(2)
run = Run(Stub(groups(model, 1e-3, 1e-3)), model)
run.step(nothing if rank else lambda: (moved(model, 0)(), moved(model, 1)()))
run = Run(Stub(groups(model, 1e-3, 1e-3), step_was_skipped=rank == 1), model)
run.step(nothing)
try:
    run.callback = type(run.callback)()
    run.told["optimizer"].step_was_skipped = False
    run.step(nothing if rank else moved(model, 0))
except TrainingError as error:
    print(error.where)
torch.distributed.destroy_process_group()
"""


def test_processes_agree(tmp_path: Path):
    """A group moves if it moves anywhere, a skip is one everywhere, and all stop together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), address],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == "optimizer group 1"


# In a real Trainer


def train(tmp_path: Path, model: Any, optimizer: Any, **settings: Any) -> Trainer:
    data = [{"input_ids": (row := toy.ids(1, 8, seed=seed)[0]), "labels": row} for seed in range(8)]
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(tmp_path / "run"), **{**defaults, **settings})
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[FirstStepMustMoveParams()],
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"warmup_steps": 1, "lr_scheduler_type": "linear"},
        {"bf16": True},
    ],
    ids=["plain", "accumulation", "warmup", "bf16"],
)
def test_a_trainer_that_learns_is_left_alone(settings: dict[str, Any], tmp_path: Path):
    trainer = train(tmp_path, toy.build(), None, **settings)
    assert trainer.state.global_step == 3


def test_a_bf16_model_at_a_tiny_rate_is_stopped(tmp_path: Path):
    with pytest.raises(OngridError, match="too small for bfloat16"):
        train(tmp_path, toy.build(dtype=torch.bfloat16), None, learning_rate=1e-9)


def test_a_rate_of_0_is_stopped_at_the_end(tmp_path: Path):
    with pytest.raises(TrainingError, match=r"after 3 optimizer steps .* 3 had a learning rate of"):
        train(tmp_path, toy.build(), None, learning_rate=0.0)


def test_a_group_that_nothing_feeds_is_stopped(tmp_path: Path):
    model = toy.build()
    stray = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW(
        [{"params": [*model.parameters()]}, {"params": [stray], "name": "stale"}], lr=1e-3
    )
    with pytest.raises(TrainingError, match="no gradient arrived") as caught:
        train(tmp_path, model, optimizer)
    assert caught.value.where == "optimizer group 1 (stale)"
    assert "not of the model" in caught.value.what


def test_a_complete_run_may_be_resumed(tmp_path: Path):
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    trainer = train(tmp_path, toy.build(), None, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
