"""A guard for any Trainer: the first optimizer step must move what it is meant to move.

Training that moves nothing looks like training that works: the loss is printed, checkpoints are
written. It happens where a step is too small for a bf16 parameter, where nothing connects a
parameter to the loss, and where an optimizer was made for other parameters than the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ongrid.errors import TrainingError, raise_all

_CHUNK = 1 << 19  # elements that are hashed at once


class FirstStepMustMoveParams(TrainerCallback):
    """Stops a training run whose first step that counts leaves a parameter group as it was.

    A step counts for a group whose learning rate is above 0 and which holds a parameter that
    requires a gradient; a step that is skipped for an overflow (fp16) counts for none. So each
    group is judged once, at its own first step, and costs nothing afterwards. Only one thing
    excuses it: gradients of exactly 0 where another group moves (the A of an adapter whose B starts
    at 0); such a group is judged at its next step. Parameters are not copied but hashed, see
    `fingerprint`. Between processes a group moves if it moves anywhere, and all of them stop.

    Raises `TrainingError` for every group that did not move, and at the end of training if no step
    counted at all.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._watched: list[_Watched] = []
        self._scale = 1.0
        self._moved: set[int] = set()
        self._excused: dict[int, TrainingError] = {}
        self._steps = self._skipped = 0
        self._expected = True

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self._begin()
        # Resuming a run that was complete takes no step, which is right.
        self._expected = state.global_step < state.max_steps

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        # Not in on_pre_optimizer_step: DeepSpeed steps within the backward pass.
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self._watched = []
        if len(self._moved) >= len(optimizer.param_groups):
            return
        self._scale = _loss_scale(optimizer)
        self._watched = [
            _Watched(index, name, lr, tensors, _hashes(tensors))
            for index, name, lr, tensors in _groups(model, optimizer)
            if lr > 0 and index not in self._moved
        ]

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        optimizer = kwargs["optimizer"]
        self._steps += 1
        watched, self._watched = self._watched, []
        if not watched:
            return
        skipped, *found = _anywhere(
            [
                # accelerate sees that a plain optimizer's step was not called, and DeepSpeed's
                # overflow; a fused one is called and skips inside, which only the scale shows.
                getattr(optimizer, "step_was_skipped", False)
                or _loss_scale(optimizer) < self._scale,
                *[flag for group in watched for flag in group.step()],
            ],
            args.device,
        )
        if skipped:
            self._skipped += 1
            return
        size = len(_Step._fields)
        steps = [_Step(*found[i : i + size]) for i in range(0, len(found), size)]
        self._moved |= {g.index for g, step in zip(watched, steps, strict=True) if step.moved}
        problems: list[TrainingError] = []
        for group, step in zip(watched, steps, strict=True):
            self._excused.pop(group.index, None)
            if step.held and not step.moved:
                if self._moved and step.reached and not step.fed:
                    self._excused[group.index] = group.error(step)
                else:
                    problems.append(group.error(step))
        raise_all(problems)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if self._expected and not self._moved:
            idle = self._steps - self._skipped
            raise TrainingError(
                f"training ended after {self._steps} optimizer steps of which none counted: "
                f"{self._skipped} were skipped for an overflow, {idle} had a learning rate of 0 "
                "or nothing that requires a gradient",
                remedy="Check the learning rate, its schedule and max_steps, and attach a method "
                "before the optimizer is made.",
            )
        raise_all(list(self._excused.values()))


class _Step(NamedTuple):
    """What a step did to a group: parts of it are held here, moved, had a gradient, one above 0."""

    held: bool
    moved: bool
    reached: bool
    fed: bool


@dataclass(frozen=True)
class _Watched:
    """A parameter group of the optimizer at the beginning of a step, with hashes of its tensors."""

    index: int
    name: str
    lr: float
    tensors: Mapping[str, Tensor]
    before: list[int]

    def step(self) -> _Step:
        gradients = [t.grad for t in self.tensors.values() if t.grad is not None]
        return _Step(
            held=any(_local(t).numel() for t in self.tensors.values()),
            moved=_hashes(self.tensors) != self.before,
            reached=bool(gradients),
            fed=any(bool(_local(gradient).any()) for gradient in gradients),
        )

    def error(self, step: _Step) -> TrainingError:
        dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in self.tensors.values()})
        if step.fed:
            why = "although gradients arrived"
            remedy = (
                f"A step at this rate is too small for {' and '.join(dtypes)}, or the optimizer "
                "does not step: train fp32 masters, or raise the learning rate."
            )
        elif step.reached:
            why, remedy = "as every gradient was 0", "The loss does not depend on them: check it."
        else:
            why = "as no gradient arrived"
            remedy = (
                "Nothing connects them to the loss: check what is frozen or detached, and that the "
                "optimizer was made for the parameters that the model has now."
            )
        return TrainingError(
            f"a step at lr {self.lr:g} changed no bit of its {len(self.tensors)} tensors, {why}: "
            f"{shown(self.tensors)}",
            where=f"optimizer group {self.index}" + f" ({self.name})" * bool(self.name),
            remedy=remedy,
        )


@torch.no_grad()
def fingerprint(tensor: Shaped[Tensor, "..."]) -> int:
    """A hash of the bits of a tensor, computed on its device with some 20 MiB beside it.

    Law: where one element changes, by any of its bits, the hash changes: an element enters through
    a bijection of its bits, times an odd number. Changes of several elements cancel by chance, once
    in some 2^32 cases or less. Neither dtype nor shape enters; strided tensors are copied.
    """
    flat = tensor.detach().reshape(-1)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    bits = flat.view(kinds.get(flat.element_size(), torch.int64))
    odd = _odd_numbers(min(len(bits), _CHUNK), bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        # Sums and products of int64 wrap around, on every device: this is arithmetic modulo 2^64.
        x = chunk * odd[: len(chunk)]
        # Without this, the signs of an even number of doubles could flip unseen.
        x ^= (x >> 32) & 0xFFFFFFFF
        total = total * 0x5851F42D4C957F2D + x.mul_(odd[: len(chunk)]).sum()
    return int(total)


def _odd_numbers(count: int, device: torch.device) -> Shaped[Tensor, " count"]:
    """The same odd numbers every time, in no simple relation to each other."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51):
        x *= factor
        x ^= (x >> 29) & 0x7FFFFFFFF
    return x | 1


def _hashes(tensors: Mapping[str, Tensor]) -> list[int]:
    return [fingerprint(_local(tensor)) for tensor in tensors.values()]


def _local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, or its shard under FSDP or ZeRO."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)  # DeepSpeed's ZeRO-3 leaves the tensor empty


def _groups(
    model: nn.Module, optimizer: Any
) -> Iterator[tuple[int, str, float, dict[str, Tensor]]]:
    """Index, name, learning rate and trainable tensors of every parameter group that has some.

    An optimizer that holds none between its steps (ZeRO-3) is seen through the model's parameters.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: list[tuple[int, str, float, dict[str, Tensor]]] = []
    for index, group in enumerate(optimizer.param_groups):
        tensors = {
            names.get(id(p), f"parameter {number} (not of the model)"): p
            for number, p in enumerate(group["params"])
            if p.requires_grad and not p.is_meta
        }
        found.append((index, group.get("name", ""), float(group["lr"]), tensors))
    if not any(group["params"] for group in optimizer.param_groups):
        lr = max((group[2] for group in found), default=0.0)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found = [(0, "the whole model", lr, {**trainable})]
    yield from (group for group in found if group[3])


def _loss_scale(optimizer: Any) -> float:
    """The scale of accelerate's GradScaler, which drops after an overflow; 1 without one."""
    scaler = getattr(optimizer, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _anywhere(flags: list[bool], device: torch.device) -> list[bool]:
    """Each flag, if it is set in any process: were one alone to stop, the others would hang."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return flags
    every = torch.tensor(flags, dtype=torch.int32, device=device)
    torch.distributed.all_reduce(every, op=torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in every.tolist()]


def shown(names: Iterable[str], most: int = 5) -> str:
    """The first few of many names, and how many there are besides."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
