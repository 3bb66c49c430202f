"""What a plain Hugging Face `Trainer` needs to train on the grid.

    method = ongrid.Peqa()
    ongrid.attach(model, method)
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, method))
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        optimizers=(optimizer, None),
        callbacks=[GridCallback(method), FirstStepMustMoveParams()],
    )

A checkpoint of such a run holds the unmerged model, masters in fp32, and the Trainer resumes from
it by itself, bit for bit; transformers does not load it as a model, since it is not merged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ongrid.errors import CalibrationError, OngridError, ResumeError, TrainingError, raise_all
from ongrid.hf.movement import FirstStepMustMoveParams, shown
from ongrid.nn import AbstractWeight, CodedWeight
from ongrid.store.shards import ShardFile, tensor_hash
from ongrid.tune.merge import MergeProof, prove
from ongrid.tune.method import AbstractMethod, quantized, trained
from ongrid.tune.state import save_state

__all__ = ["FirstStepMustMoveParams", "GridCallback", "UNMERGED", "block_ap_batches"]

UNMERGED = "ongrid-unmerged.safetensors"
"""The file in which `GridCallback` keeps what trains; `ongrid.load_state` reads it."""

_FILLS = {"input_ids": None, "attention_mask": 0, "position_ids": 0, "token_type_ids": 0}
"""What stands at padded positions of the arguments that can be padded; None: the pad id."""

_LABELS = {"labels", "label", "label_ids"}

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def block_ap_batches(
    trainer: Trainer,
    *,
    train_size: int,
    seqlen: int,
    batch_size: int,
    allow_fewer: bool = False,
) -> list[dict[str, Tensor]]:
    """The first `train_size` rows that a Trainer would train on, as batches to calibrate with.

    Rows come in the order that an epoch would have now, collated and on the device as in training,
    without labels. A row is cut to its first `seqlen` positions; masked positions at its ends are
    no part of it, and a row without any other is left out. Arguments of the shape of `input_ids`
    are cut with them; others of 1 or 2 dimensions, a row each, stay whole. Every batch has
    `batch_size` rows, the last one what remains. Rows of unequal length are filled up to the
    longest of their batch, on the side on which the data was padded, with mask 0; without an
    `attention_mask` they cannot stand in one batch, which is an error.

    The data is read only as far as needed, but for the one batch that accelerate is ahead, and no
    generator of random numbers is moved. Raises `CalibrationError` for a Trainer without data, for
    fewer rows (unless `allow_fewer`, and there is one), for arguments that cannot be cut, and in a
    run of several processes, which would each calibrate on other rows.
    """
    _check_request(trainer, train_size=train_size, seqlen=seqlen, batch_size=batch_size)
    with _generators_kept():
        rows, blank = _rows(trainer, train_size, seqlen)
    if len(rows) < (1 if allow_fewer else train_size):
        raise CalibrationError(
            f"{train_size} rows were asked for, {len(rows)} are there ({blank} more hold nothing)",
            where="train_dataset",
            remedy=f"Ask for {len(rows) or 'fewer'}, give more data, or say allow_fewer=True.",
        )
    pad = _pad_id(trainer)
    starts = range(0, len(rows), batch_size)
    return [_batch(rows[start : start + batch_size], pad, f"row {start}") for start in starts]


def _check_request(trainer: Trainer, **counts: int) -> None:
    problems = [
        CalibrationError(f"`{name}` is {count}, expected 1 or more")
        for name, count in counts.items()
        if count < 1
    ]
    if trainer.args.world_size > 1:
        problems.append(
            CalibrationError(
                f"this is one of {trainer.args.world_size} processes, and each would calibrate on "
                "other rows",
                remedy="Quantize in one process, and tune the artifact in several.",
            )
        )
    raise_all(problems)


@dataclass(frozen=True)
class _Row:
    """One row: arguments `[T]` along its tokens, what belongs to it as a whole, and its padding."""

    along: dict[str, Tensor]
    whole: dict[str, Tensor]
    left_padded: bool

    def __len__(self) -> int:
        return len(self.along["input_ids"])


def _rows(trainer: Trainer, wanted: int, seqlen: int) -> tuple[list[_Row], int]:
    """The first rows that hold something, at most `wanted`, and how many held nothing."""
    try:
        loader = trainer.get_train_dataloader()
    except ValueError as error:
        if trainer.train_dataset is not None:
            raise
        raise CalibrationError(
            "the Trainer has no train_dataset", remedy="Give it one, or give batches of your own."
        ) from error
    labels = _LABELS | set(trainer.label_names or ())
    rows: list[_Row] = []
    blank = 0
    try:
        for number, batch in enumerate(loader):
            where = f"training batch {number}"
            if not isinstance(batch, Mapping):
                raise CalibrationError(f"is a {type(batch).__name__}, no dictionary", where=where)
            prepared = trainer._prepare_inputs(dict(batch))
            found = _split(
                {n: v for n, v in prepared.items() if n not in labels and v is not None},
                seqlen,
                where,
            )
            rows += [row for row in found if len(row)]
            blank += sum(not len(row) for row in found)
            if len(rows) >= wanted:
                break
    finally:
        if isinstance(loader, DataLoaderStateMixin):
            loader.end()  # else accelerate takes a loader that was left early for the current one
    return rows[:wanted], blank


def _split(arguments: Mapping[str, Any], seqlen: int, where: str) -> list[_Row]:
    """The rows of one batch of arguments, cut; blank ones have no position."""
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise CalibrationError(
            "`input_ids` [rows tokens] are missing",
            where=where,
            remedy="Check the collator, and that the dataset is tokenized.",
        )
    along = {n: t for n, t in arguments.items() if isinstance(t, Tensor) and t.shape == ids.shape}
    whole = {n: t for n, t in arguments.items() if n not in along}
    problems = [
        CalibrationError(
            f"`{name}` {_kind(value)} cannot be cut along input_ids {tuple(ids.shape)}",
            where=where,
            remedy="Let the collator give [rows tokens], leave it out, or make batches yourself.",
        )
        for name, value in whole.items()
        if name in _FILLS
        or not isinstance(value, Tensor)
        or value.dim() not in (1, 2)
        or len(value) != len(ids)
    ]
    raise_all(problems)
    mask = along["attention_mask"] != 0 if "attention_mask" in along else torch.ones_like(ids)
    rows = []
    for i, real in enumerate(mask.bool().cpu()):
        positions = real.nonzero()[:, 0]
        start = int(positions[0]) if len(positions) else 0
        kept = positions[positions < start + seqlen]
        cut = slice(start, int(kept[-1]) + 1 if len(kept) else start)
        rows.append(
            _Row(
                {name: t[i, cut] for name, t in along.items()},
                {name: t[i] for name, t in whole.items()},
                left_padded=start > 0,
            )
        )
    return rows


def _kind(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _batch(rows: list[_Row], pad: int, where: str) -> dict[str, Tensor]:
    """Rows stacked; shorter ones filled up, which the mask says."""
    names = [(*row.along, *row.whole) for row in rows]
    if any(set(other) != set(names[0]) for other in names):
        raise CalibrationError(
            f"has other arguments than its neighbours: {sorted(set(names[0]))}",
            where=where,
            remedy="Let the collator give the same arguments for every row.",
        )
    longest = max(map(len, rows))
    left = any(row.left_padded for row in rows)
    if any(len(row) < longest for row in rows):
        unknown = sorted({*rows[0].along} - _FILLS.keys())
        if "attention_mask" not in rows[0].along or unknown:
            lacks = f"nobody knows how to pad {unknown}" if unknown else "no attention_mask says so"
            raise CalibrationError(
                f"rows of {min(map(len, rows))} to {longest} tokens must be padded to stand in one "
                f"batch, and {lacks}",
                where=where,
                remedy="Let the collator give an attention_mask or rows of one length, or use "
                "batch_size=1.",
            )

    def filled(row: _Row, name: str) -> Tensor:
        fill = _FILLS.get(name)
        more = longest - len(row)
        sides = (more, 0) if left else (0, more)
        value = pad if fill is None else fill
        return nn.functional.pad(row.along[name], sides, value=value)

    along = {name: torch.stack([filled(row, name) for row in rows]) for name in rows[0].along}
    return along | {n: torch.stack([row.whole[n] for row in rows]) for n in rows[0].whole}


def _pad_id(trainer: Trainer) -> int:
    """The id at positions that are masked; any id of the vocabulary would do, and 0 is one."""
    owners = (
        trainer.processing_class,
        getattr(trainer.data_collator, "tokenizer", None),
        getattr(trainer.model, "config", None),
    )
    found = (getattr(owner, "pad_token_id", None) for owner in owners)
    return next((int(pad) for pad in found if isinstance(pad, int) and pad >= 0), 0)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Within the context random numbers are drawn as always; afterwards nobody has drawn any."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    plain, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numpys)


class GridCallback(TrainerCallback):
    """Watches over a method's training in a plain Trainer: at the start, at saves, at the end.

    At the start: every quantized matrix holds what `method` trains, as fp32 masters that require a
    gradient; the optimizer has each exactly once, without weight decay, and whatever else the model
    trains; a run that is resumed has the masters of its checkpoint. At a save: the unmerged state,
    in `checkpoint-N/ongrid-unmerged.safetensors`. At the end: the unmerged state in the output
    folder, and then the proof that the model merges into what was trained, in `proof`. The model
    is not merged and can train on: `ongrid.merge(model, out)` writes it.

    Raises `TrainingError`, everything found together, `StructureError` for a model without
    quantized matrices, `ResumeError`, and `MergeMismatch` for a proof that fails.
    """

    def __init__(self, method: AbstractMethod) -> None:
        self.method = method
        self.proof: MergeProof | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.proof = None
        model = kwargs["model"]
        raise_all(
            [
                *_sharded(model),
                *_other_methods(model, self.method),
                *_masters(model),
                *_coverage(model, kwargs["optimizer"]),
            ]
        )
        file = _checkpoint(args, state) / UNMERGED
        if state.global_step and file.exists():
            _check_resumed(model, file)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.should_save:
            save_state(kwargs["model"], _checkpoint(args, state) / UNMERGED)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        if args.should_save:  # First, so that no check can lose it.
            save_state(model, Path(str(args.output_dir)) / UNMERGED)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(str(args.mixed_precision))
        with torch.autocast(args.device.type, dtype, enabled=dtype is not None):
            self.proof = prove(model)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder into which the Trainer saves at this step."""
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _sharded(model: nn.Module) -> list[OngridError]:
    """Masters in pieces can neither be hashed, nor saved, nor merged yet."""
    kind = AcceleratorState().distributed_type
    if kind not in _SHARDED and not any(isinstance(p, DTensor) for p in model.parameters()):
        return []
    return [
        TrainingError(
            f"the parameters of this run are sharded ({kind.value}), which is not supported yet",
            remedy="Train with DDP or on one device.",
        )
    ]


def _other_methods(model: nn.Module, method: AbstractMethod) -> list[OngridError]:
    """Quantized matrices that hold something else than what the method attaches to them."""
    attached: dict[str, tuple[type, frozenset[str]]] = {}
    wrong: list[str] = []
    problems: list[OngridError] = []
    for path, linear in quantized(model).items():
        weight = linear.weight_quantizer
        grid = str(weight.grid)
        if grid not in attached:
            try:
                fixed = CodedWeight(weight.freeze(), weight.dtype)
                attached[grid] = _parameters(method.attach(fixed, Generator()))
            except OngridError as error:
                problems.append(error.at(path))
                attached[grid] = _parameters(weight)
        if _parameters(weight) != attached[grid]:
            wrong.append(path)
    if wrong:
        problems.append(
            TrainingError(
                f"{len(wrong)} quantized matrices do not hold what {method} trains: {shown(wrong)}",
                remedy="Call `ongrid.attach(model, method)` with this method, and make the "
                "optimizer after it.",
            )
        )
    return problems


def _parameters(weight: AbstractWeight) -> tuple[type, frozenset[str]]:
    return type(weight), frozenset(name for name, _ in weight.named_parameters())


def _masters(model: nn.Module) -> list[OngridError]:
    """Parameters of quantized matrices that are no fp32 masters, or do not train."""
    narrow: list[str] = []
    frozen: list[str] = []
    for path, linear in quantized(model).items():
        for name, p in linear.weight_quantizer.named_parameters(f"{path}.weight_quantizer"):
            if p.dtype != torch.float32:
                narrow.append(f"{name} ({str(p.dtype).removeprefix('torch.')})")
            if not p.requires_grad:
                frozen.append(name)
    return [
        TrainingError(f"{len(names)} tensors that should train {what}: {shown(names)}", remedy=do)
        for names, what, do in (
            (narrow, "are no fp32 masters", "Attach the method anew, and cast the model only."),
            (frozen, "do not require a gradient", "Set their requires_grad to True."),
        )
        if names
    ]


def _coverage(model: nn.Module, optimizer: Any) -> list[OngridError]:
    """Parameters that train and are not in the optimizer just once, and masters that decay."""
    groups = optimizer.param_groups
    counts = Counter(id(p) for group in groups for p in group["params"])
    decaying = {id(p) for group in groups if group.get("weight_decay") for p in group["params"]}
    masters = {
        id(p) for linear in quantized(model).values() for p in linear.weight_quantizer.parameters()
    }
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in named if not counts[id(p)]]
    twice = [name for name, p in named if counts[id(p)] > 1]
    decayed = [name for name, p in named if id(p) in masters & decaying]
    remedy = (
        "Make the optimizer after `attach`: "
        "optimizers=(torch.optim.AdamW(ongrid.parameter_groups(model, method)), None)."
    )
    return [
        TrainingError(f"{len(names)} tensors that train {what}: {shown(names)}", remedy=remedy)
        for names, what in (
            (missing, "are not in the optimizer"),
            (twice, "are in the optimizer more than once"),
            (decayed, "would decay towards 0, which no scale, zero or adapter may"),
        )
        if names
    ]


def _check_resumed(model: nn.Module, file: Path) -> None:
    """A Trainer only warns of tensors that its checkpoint lacks; here that is an error."""
    stored, training = ShardFile(file), trained(model)
    differing = [
        name
        for name in sorted({*stored.infos, *training})
        if name not in stored.infos
        or name not in training
        or tensor_hash(stored.read(name)) != tensor_hash(model.get_parameter(name))
    ]
    if differing:
        raise ResumeError(
            f"{len(differing)} tensors that train are not those of this checkpoint: "
            f"{shown(differing)}",
            where=str(file.parent),
            remedy="Attach the method that the run began with, or use a new output folder.",
        )
