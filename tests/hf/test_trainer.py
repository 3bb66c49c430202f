"""A plain Hugging Face Trainer: rows to calibrate with, and training on the grid under watch."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import GradientState
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import ongrid
import toy
from laws.table import assert_same
from ongrid.errors import (
    CalibrationError,
    MergeMismatch,
    OngridError,
    Problems,
    ResumeError,
    StoreError,
    StructureError,
    TrainingError,
)
from ongrid.export.verify import verify
from ongrid.hf.trainer import (
    UNMERGED,
    FirstStepMustMoveParams,
    GridCallback,
    _generators_kept,
    block_ap_batches,
)
from ongrid.nn import quant_linears
from ongrid.store.shards import ShardFile
from ongrid.tune.merge import merge, prove
from ongrid.tune.method import AbstractMethod

METHODS: dict[str, AbstractMethod] = {
    "peqa": ongrid.Peqa(lr=1e-3),
    "qalora": ongrid.QaLora(rank=4, alpha=8.0, scales=True, dropout=0.1, lr=1e-2),
    "qalora_alone": ongrid.QaLora(rank=4, alpha=8.0, lr=1e-2),
}
each_method = pytest.mark.parametrize("name", METHODS)


def arguments(out: Path, **settings: Any) -> TrainingArguments:
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "save_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return TrainingArguments(output_dir=str(out), **{**defaults, **settings})


def row(number: int, tokens: int = 12) -> dict[str, Tensor]:
    """A row that is told apart from others by its first two ids."""
    ids = toy.ids(1, tokens, seed=number)[0]
    ids[0], ids[1] = 3 + number % 90, 3 + number // 90
    return {"input_ids": ids, "labels": ids.clone()}


def dataset(rows: int = 24, tokens: int = 12) -> list[dict[str, Tensor]]:
    return [row(number, tokens) for number in range(rows)]


# Rows to calibrate with


def plain(tmp_path: Path, data: Any, **settings: Any) -> Trainer:
    trainer = {
        name: settings.pop(name)
        for name in ("data_collator", "processing_class")
        if name in settings
    }
    args = arguments(tmp_path / "run", **settings)
    return Trainer(toy.build(), args, train_dataset=data, **trainer)


def test_rows_are_exact_in_number_and_batch_without_labels(tmp_path: Path):
    """Batches of the loader have 3 rows and a tail of 1."""
    data = dataset(10)
    for item in data:
        item |= {"label_ids": item["labels"], "custom": item["labels"]}
    trainer = plain(
        tmp_path,
        data,
        per_device_train_batch_size=3,
        label_names=["custom"],
        remove_unused_columns=False,
    )
    for size in (1, 5, 9, 10):
        found = block_ap_batches(trainer, train_size=size, seqlen=7, batch_size=2)
        assert [len(batch["input_ids"]) for batch in found] == [2] * (size // 2) + [1] * (size % 2)
        assert all(batch.keys() == {"input_ids"} for batch in found)
        for ids in torch.cat([batch["input_ids"] for batch in found]):
            assert_same(ids, row(int(ids[0]) - 3)["input_ids"][:7])


def test_rows_are_those_of_the_first_epoch(tmp_path: Path):
    trainer = plain(tmp_path, dataset(), max_steps=12)
    found = block_ap_batches(trainer, train_size=24, seqlen=99, batch_size=24)
    seen: list[int] = []
    step = trainer.training_step

    def noting(model: Any, inputs: Any, *rest: Any) -> Any:
        seen.extend(inputs["input_ids"][:, 0].tolist())
        return step(model, inputs, *rest)

    trainer.training_step = noting  # type: ignore[method-assign]
    trainer.train()
    assert found[0]["input_ids"][:, 0].tolist() == seen
    assert seen != sorted(seen)


def states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
    }


def current() -> set[int]:
    """The loaders that accelerate takes to be in use; a Trainer leaves its last one there."""
    return {id(loader) for loader in GradientState().dataloader_references if loader is not None}


def drawn() -> None:
    torch.rand(()), random.random(), np.random.rand()


def test_nothing_is_drawn_and_training_is_as_if_nobody_had_looked(tmp_path: Path):
    class Drawing(list):
        def __getitem__(self, index: Any) -> Any:
            drawn()
            return super().__getitem__(index)

    def trained(look: bool, **settings: Any) -> dict[str, Tensor]:
        trainer = plain(tmp_path, Drawing(dataset()), **settings)
        if look:
            before, loaders = states(), current()
            found = block_ap_batches(trainer, train_size=5, seqlen=8, batch_size=2)
            again = block_ap_batches(trainer, train_size=5, seqlen=8, batch_size=2)
            assert {**states(), "python": 0} == {**before, "python": 0}  # beartype draws from it
            for one, other in zip(found, again, strict=True):
                assert_same(one["input_ids"], other["input_ids"])
            assert current() <= loaders
        trainer.train()
        return {name: p.detach() for name, p in trainer.model.named_parameters()}

    for sampling in ("random", "group_by_length"):
        settings = {"train_sampling_strategy": sampling, "save_strategy": "no", "max_steps": 3}
        expected, found = trained(False, **settings), trained(True, **settings)
        for name, p in expected.items():
            assert_same(found[name], p)


def test_every_generator_is_kept_also_on_errors():
    before = states()
    with pytest.raises(KeyError), _generators_kept():
        drawn()
        assert all(states()[kind] != state for kind, state in before.items())
        raise KeyError
    assert states() == before


class Stream(IterableDataset):
    """Rows without a length, counting how many were read."""

    def __init__(self, rows: int | None) -> None:
        self.rows, self.read = rows, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        number = 0
        while self.rows is None or number < self.rows:
            self.read += 1
            yield row(number)
            number += 1


def test_a_stream_is_read_as_far_as_needed(tmp_path: Path):
    stream, loaders = Stream(None), current()
    trainer = plain(tmp_path, stream)
    found = block_ap_batches(trainer, train_size=5, seqlen=12, batch_size=4)
    assert_same(
        torch.cat([batch["input_ids"] for batch in found]),
        torch.stack([row(number)["input_ids"] for number in range(5)]),
    )
    assert stream.read <= 5 + 1 + 2  # to the end of its batch, and one batch ahead
    assert current() <= loaders


def test_too_few_rows_are_an_error_or_asked_for(tmp_path: Path):
    for data in (dataset(5), Stream(5)):
        trainer = plain(tmp_path, data)
        with pytest.raises(CalibrationError, match="6 rows were asked for, 5 are there") as caught:
            block_ap_batches(trainer, train_size=6, seqlen=8, batch_size=2)
        assert "allow_fewer" in caught.value.remedy and "Ask for 5" in caught.value.remedy
        found = block_ap_batches(trainer, train_size=6, seqlen=8, batch_size=2, allow_fewer=True)
        assert [len(batch["input_ids"]) for batch in found] == [2, 2, 1]
    ids = torch.ones(2, 4, dtype=torch.int64)
    blank = given(tmp_path, {"input_ids": ids, "attention_mask": 0 * ids})
    with pytest.raises(CalibrationError, match=r"0 are there \(2 more hold nothing\)"):
        block_ap_batches(blank, train_size=6, seqlen=8, batch_size=2, allow_fewer=True)


def test_requests_that_make_no_sense_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = plain(tmp_path, dataset())
    with pytest.raises(Problems, match="`train_size` is 0") as caught:
        block_ap_batches(trainer, train_size=0, seqlen=-1, batch_size=0)
    assert len(caught.value.problems) == 3
    with pytest.raises(TypeError):
        block_ap_batches(trainer)  # pyright: ignore[reportCallIssue]
    with pytest.raises(CalibrationError, match="no train_dataset"):
        block_ap_batches(plain(tmp_path, None), train_size=1, seqlen=1, batch_size=1)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(CalibrationError, match="one of 2 processes"):
        block_ap_batches(trainer, train_size=1, seqlen=1, batch_size=1)


LENGTHS = [5, 9, 3, 12, 7, 4, 11]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    (tmp_path / "tokenizer").mkdir()
    toy.add_tokenizer(tmp_path / "tokenizer")
    made = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    made.pad_token = "</s>"
    return made


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_unequal_length_are_padded_where_the_data_was(
    side: str, tokenizer: Any, tmp_path: Path
):
    """The loader pads by twos, the batches hold threes."""
    tokenizer.padding_side = side
    data = [{"input_ids": row(i, length)["input_ids"]} for i, length in enumerate(LENGTHS)]
    trainer = plain(
        tmp_path,
        data,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_sampling_strategy="sequential",
    )
    found = block_ap_batches(trainer, train_size=7, seqlen=8, batch_size=3)
    assert [tuple(batch["input_ids"].shape) for batch in found] == [(3, 8), (3, 8), (1, 8)]
    number = 0
    for batch in found:
        assert batch.keys() == {"input_ids", "attention_mask"}
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            kept = data[number]["input_ids"][:8]
            assert_same(ids[mask.bool()], kept)
            real = slice(0, len(kept)) if side == "right" else slice(8 - len(kept), 8)
            assert bool(mask[real].all()) and int(mask.sum()) == len(kept)
            assert bool((ids[~mask.bool()] == tokenizer.pad_token_id).all())
            number += 1


def collated(*batches: dict[str, Any]) -> Any:
    """A collator that gives these batches, one after the other."""
    left = iter(batches)
    return lambda features: next(left)


def given(tmp_path: Path, *batches: dict[str, Any]) -> Trainer:
    return plain(
        tmp_path,
        dataset(2 * len(batches)),
        data_collator=collated(*batches),
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )


def test_arguments_along_the_tokens_are_cut_and_others_stay_whole(tmp_path: Path):
    mask = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 0, 0]])
    batch = {
        "input_ids": torch.arange(10).reshape(2, 5),
        "attention_mask": mask.bool(),
        "position_ids": torch.arange(10).reshape(2, 5) + 20,
        "task": torch.tensor([7, 8]),
        "scores": torch.tensor([[0.5], [0.25]]),
        "absent": None,
        "labels": torch.zeros(2, 5),
    }
    trainer = given(tmp_path, batch)
    (found,) = block_ap_batches(trainer, train_size=2, seqlen=3, batch_size=2)
    # The first row begins at 1 and is cut after 3 positions, a hole among them.
    assert found["input_ids"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert found["attention_mask"].tolist() == [[True, False, True], [True, True, True]]
    assert found["position_ids"].tolist() == [[21, 22, 23], [25, 26, 27]]
    assert found["task"].tolist() == [7, 8] and found["scores"].tolist() == [[0.5], [0.25]]
    trainer = given(tmp_path, batch)
    (found,) = block_ap_batches(trainer, train_size=2, seqlen=2, batch_size=2)
    assert found["attention_mask"].tolist() == [[False, True], [True, True]]
    assert found["input_ids"].tolist() == [[trainer.model.config.pad_token_id, 1], [5, 6]]
    trainer = given(tmp_path, batch)
    trainer.model.config.pad_token_id = -1  # some configs say so, and no embedding has it
    (found,) = block_ap_batches(trainer, train_size=2, seqlen=2, batch_size=2)
    assert found["input_ids"].tolist() == [[0, 1], [5, 6]]


def test_rows_that_hold_nothing_are_left_out_and_counted(tmp_path: Path):
    ids = torch.arange(4).reshape(2, 2)
    blank = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0], [1, 1]])}
    full = {"input_ids": ids + 10, "attention_mask": torch.ones_like(ids)}
    (found,) = block_ap_batches(given(tmp_path, blank, full), train_size=3, seqlen=2, batch_size=3)
    assert found["input_ids"].tolist() == [[2, 3], [10, 11], [12, 13]]
    with pytest.raises(CalibrationError, match=r"3 are there \(1 more hold nothing\)"):
        block_ap_batches(given(tmp_path, blank, full), train_size=4, seqlen=2, batch_size=3)


def test_what_cannot_be_cut_or_padded_is_refused_by_name(tmp_path: Path):
    ids = torch.ones(2, 4, dtype=torch.int64)
    long = {"input_ids": torch.ones(2, 6, dtype=torch.int64)}
    request = {"train_size": 4, "seqlen": 8, "batch_size": 4}
    wrong = {
        "attention_mask": torch.ones(2, 1, 4, 4),
        "position_ids": torch.ones(1, 4),
        "images": torch.ones(2, 3, 4, 4),
        "kind": "text",
    }
    with pytest.raises(Problems) as caught:
        block_ap_batches(given(tmp_path, {"input_ids": ids, **wrong}), **request)
    assert [p.what.split("`")[1] for p in caught.value.problems] == list(wrong)
    assert "(2, 1, 4, 4)" in str(caught.value) and "training batch 0" in str(caught.value)
    for batch in ({"text": ["a"]}, {"input_ids": ids[0]}):
        with pytest.raises(CalibrationError, match="`input_ids`"):
            block_ap_batches(given(tmp_path, batch), **request)
    with pytest.raises(CalibrationError, match="no attention_mask says so"):
        block_ap_batches(given(tmp_path, {"input_ids": ids}, long), **request)
    one_each = {**request, "batch_size": 2}
    found = block_ap_batches(given(tmp_path, {"input_ids": ids}, long), **one_each)
    assert [batch["input_ids"].shape[1] for batch in found] == [4, 6]
    strange = [{**b, "attention_mask": b["input_ids"], "depth": b["input_ids"]} for b in
               ({"input_ids": ids}, long)]  # fmt: skip
    with pytest.raises(CalibrationError, match=r"nobody knows how to pad \['depth'\]"):
        block_ap_batches(given(tmp_path, *strange), **request)
    with pytest.raises(CalibrationError, match="other arguments"):
        block_ap_batches(given(tmp_path, {"input_ids": ids}, strange[0]), **request)


def test_a_model_is_quantized_with_them(tmp_path: Path):
    trainer = plain(tmp_path, dataset())
    found = block_ap_batches(trainer, train_size=5, seqlen=10, batch_size=2)
    model: Any = ongrid.quantize(trainer.model, toy.recipe(), found, algorithm="gptq")
    assert quant_linears(model)


# Training on the grid


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An artifact of a toy model with weights in bf16."""
    folder = toy.save(toy.build(dtype=torch.bfloat16), tmp_path / "source")
    ongrid.quantize(folder, toy.recipe(), out=tmp_path / "q")
    return tmp_path / "q"


def attached(source: Path, method: AbstractMethod, seed: int = 0) -> Any:
    model: Any = ongrid.load(source)
    ongrid.attach(model, method, seed=seed)
    return model


def made(
    model: Any, method: AbstractMethod, out: Path, optimizer: Any = None, /, **settings: Any
) -> tuple[Trainer, GridCallback]:
    callback = GridCallback(method)
    if optimizer is None:
        optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, method))
    trainer = Trainer(
        model,
        arguments(out, **settings),
        train_dataset=dataset(),
        eval_dataset=dataset(2),
        optimizers=(optimizer, None),
        callbacks=[callback, FirstStepMustMoveParams()],
    )
    return trainer, callback


def trainable(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(toy.ids(1, 9, seed=7)).logits


@each_method
@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}],
                         ids=["plain", "bf16", "accumulation"])  # fmt: skip
def test_a_trainer_tunes_an_artifact(
    name: str, settings: dict[str, Any], source: Path, tmp_path: Path
):
    """The recipe of the README."""
    method = METHODS[name]
    model = attached(source, method)
    before = trainable(model)
    trainer, callback = made(model, method, tmp_path / "run", **settings)
    trainer.train()
    after = trainable(model)
    assert all(p.dtype == torch.float32 for p in after.values())
    assert any(not torch.equal(p, before[n]) for n, p in after.items())
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # it was put around forward
    expected = logits(model)
    for folder in (tmp_path / "run", *(tmp_path / "run").glob("checkpoint-*")):
        stored = ShardFile(folder / UNMERGED)
        assert stored.infos.keys() == after.keys()
    for key, p in after.items():
        assert_same(ShardFile(tmp_path / "run" / UNMERGED).read(key), p)
    assert callback.proof is not None and callback.proof.differing == 0
    assert trainable(model).keys() == after.keys()  # not merged
    assert ongrid.merge(model, tmp_path / "tuned").codes == callback.proof.codes
    assert_same(logits(ongrid.load(tmp_path / "tuned")), expected)
    assert verify(tmp_path / "tuned", fresh_process=False).ok


@each_method
def test_a_resumed_run_is_the_uninterrupted_one(name: str, source: Path, tmp_path: Path):
    """A new model, differently drawn adapters, and the Trainer's own checkpoint."""
    method = METHODS[name]
    whole = attached(source, method)
    made(whole, method, tmp_path / "run")[0].train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    resumed = attached(source, method, seed=9)
    trainer, callback = made(resumed, method, tmp_path / "run")
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6 and callback.proof is not None
    for key, p in trainable(whole).items():
        assert_same(trainable(resumed)[key], p)
    assert_same(logits(resumed), logits(whole))


RESUME = """
import sys, torch, ongrid
from pathlib import Path
from test_trainer import METHODS, attached, made
from ongrid import save_state
source, run, out, name = sys.argv[1:]
model = attached(Path(source), METHODS[name], seed=5)
made(model, METHODS[name], Path(run))[0].train(resume_from_checkpoint=True)
save_state(model, out)
"""


def test_a_new_process_resumes_to_the_same_masters(source: Path, tmp_path: Path):
    method = METHODS["qalora"]
    whole = attached(source, method)
    made(whole, method, tmp_path / "run")[0].train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    here = Path(__file__).parent
    given = [str(source), str(tmp_path / "run"), str(tmp_path / "found"), "qalora"]
    code = (
        f"import sys, torch; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; "
        f"torch.set_num_threads({torch.get_num_threads()})\n{RESUME}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = ShardFile(tmp_path / "found")
    for key, p in trainable(whole).items():
        assert_same(found.read(key), p)


def test_resuming_with_another_method_is_refused(source: Path, tmp_path: Path):
    """The Trainer itself would only warn, and train the adapter that it did not find."""
    made(attached(source, METHODS["peqa"]), METHODS["peqa"], tmp_path / "run")[0].train()
    method = METHODS["qalora_alone"]
    trainer, _ = made(attached(source, method), method, tmp_path / "run", max_steps=9)
    # The optimizer's state has another number of tensors: the Trainer would stop at that.
    for file in (tmp_path / "run").glob("checkpoint-*/optimizer.pt"):
        file.unlink()
    with pytest.raises(ResumeError, match="not those of this checkpoint") as caught:
        trainer.train(resume_from_checkpoint=True)
    assert caught.value.where.endswith("checkpoint-6")


@each_method
def test_a_checkpoint_is_resumed_from_but_not_served(name: str, source: Path, tmp_path: Path):
    """transformers would leave the adapters out, with a warning."""
    method = METHODS[name]
    model = attached(source, method)
    trainer, _ = made(model, method, tmp_path / "run", max_steps=3)
    trainer.train()
    with pytest.raises(StoreError, match="in the middle of its training") as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3")
    assert "merge" in caught.value.remedy
    again = attached(source, method, seed=4)
    ongrid.load_state(again, tmp_path / "run" / "checkpoint-3" / UNMERGED)
    assert_same(logits(again), logits(model))
    merge(model)
    model.save_pretrained(tmp_path / "merged")
    assert_same(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(model))


@each_method
def test_the_best_checkpoint_is_put_back_whole(name: str, source: Path, tmp_path: Path):
    method = METHODS[name]
    model = attached(source, method)
    trainer, callback = made(
        model,
        method,
        tmp_path / "run",
        eval_strategy="steps",
        eval_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="step",
        greater_is_better=False,
    )
    trainer.evaluate = lambda *args, **kwargs: {"eval_step": float(trainer.state.global_step)}
    trainer.train()
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-3")
    stored = ShardFile(tmp_path / "run" / "checkpoint-3" / UNMERGED)
    for key, p in trainable(model).items():
        assert_same(stored.read(key), p)
    assert callback.proof == prove(model)


def test_no_checkpoint_is_needed_to_keep_what_was_trained(source: Path, tmp_path: Path):
    method = METHODS["peqa"]
    model = attached(source, method)
    trainer, _ = made(model, method, tmp_path / "run", save_strategy="no")
    trainer.train()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [UNMERGED]
    assert ShardFile(tmp_path / "run" / UNMERGED).infos.keys() == trainable(model).keys()


def test_a_live_quantized_model_trains_and_resumes(tmp_path: Path):
    method = METHODS["peqa"]

    def live() -> Any:
        model = ongrid.quantize(toy.build(), toy.recipe())
        ongrid.attach(model, method)
        return model

    whole, resumed = live(), live()
    made(whole, method, tmp_path / "run")[0].train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    made(resumed, method, tmp_path / "run")[0].train(resume_from_checkpoint=True)
    for key, p in trainable(whole).items():
        assert_same(trainable(resumed)[key], p)


# What is refused


def refused(trainer: Trainer) -> list[OngridError]:
    with pytest.raises(OngridError) as caught:
        trainer.train()
    assert trainer.state.global_step == 0
    error = caught.value
    return list(error.problems) if isinstance(error, Problems) else [error]


def test_a_model_that_is_not_quantized_or_not_attached_is_refused(source: Path, tmp_path: Path):
    method = METHODS["peqa"]
    model = toy.build()
    trainer, _ = made(model, method, tmp_path / "run", torch.optim.AdamW(model.parameters()))
    (error,) = refused(trainer)
    assert isinstance(error, StructureError) and "nothing in this model is quantized" in error.what
    model = ongrid.load(source)
    trainer, _ = made(model, method, tmp_path / "run", torch.optim.AdamW(model.parameters()))
    (error,) = refused(trainer)
    assert isinstance(error, TrainingError)
    assert "21 quantized matrices do not hold what Peqa" in error.what
    assert "q_proj" in error.what and "and 16 more" in error.what and "attach" in error.remedy


@pytest.mark.parametrize(
    "meant", [ongrid.QaLora(rank=4), ongrid.Peqa(zeros=True)], ids=["qalora", "zeros"]
)
def test_another_method_than_the_attached_one_is_refused(
    meant: AbstractMethod, source: Path, tmp_path: Path
):
    model = attached(source, METHODS["peqa"])
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, METHODS["peqa"]))
    (error,) = refused(made(model, meant, tmp_path / "run", optimizer)[0])
    assert "do not hold what" in error.what


def test_a_method_that_this_grid_cannot_train_is_named(tmp_path: Path):
    model = ongrid.quantize(toy.build(), toy.recipe("int4.32.sym.fp16"))
    ongrid.attach(model, METHODS["peqa"])
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, METHODS["peqa"]))
    (error,) = refused(made(model, METHODS["qalora"], tmp_path / "run", optimizer)[0])
    assert "no zeros" in error.what and error.where.endswith("q_proj")


def test_a_stale_optimizer_and_weight_decay_are_refused(source: Path, tmp_path: Path):
    method = METHODS["peqa"]
    model: Any = ongrid.load(source)
    stale = torch.optim.AdamW(model.parameters())
    ongrid.attach(model, method)
    (error,) = refused(made(model, method, tmp_path / "run", stale)[0])
    assert "21 tensors that train are not in the optimizer" in error.what
    assert "parameter_groups" in error.remedy
    decaying = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    (error,) = refused(made(model, method, tmp_path / "run", decaying)[0])
    assert "would decay" in error.what and "scale" in error.what


def test_parameters_outside_must_be_in_the_optimizer_too(source: Path, tmp_path: Path):
    method = METHODS["peqa"]
    model = attached(source, method)
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, method))
    model.model.norm.weight.requires_grad_()
    (error,) = refused(made(model, method, tmp_path / "run", optimizer)[0])
    assert error.what.endswith("are not in the optimizer: model.norm.weight")
    groups = ongrid.parameter_groups(model, method, extra_lr=1e-2)
    trainer, callback = made(model, method, tmp_path / "run", torch.optim.AdamW(groups))
    trainer.train()
    assert callback.proof is not None
    assert "model.norm.weight" in ShardFile(tmp_path / "run" / UNMERGED).infos


def test_everything_that_is_wrong_is_said_at_once(source: Path, tmp_path: Path):
    method = METHODS["peqa"]
    model = attached(source, method)
    scales = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([{"params": scales[2:], "lr": 1e-3, "weight_decay": 0.1}])
    optimizer.param_groups[0]["params"].append(scales[5])
    scales[3].requires_grad_(False)
    scales[4].data = scales[4].data.bfloat16()
    problems = refused(made(model, method, tmp_path / "run", optimizer)[0])
    said = "\n".join(problem.what for problem in problems)
    for what in ("no fp32 masters", "do not require", "not in", "more than once", "would decay"):
        assert what in said, what
    assert len(problems) == 5 and "(bfloat16)" in said


def test_sharded_runs_are_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from accelerate.utils import DistributedType

    method = METHODS["peqa"]
    trainer, _ = made(attached(source, method), method, tmp_path / "run")
    state = type("AcceleratorState", (), {"distributed_type": DistributedType.FSDP})
    monkeypatch.setattr("ongrid.hf.trainer.AcceleratorState", state)
    (error,) = refused(trainer)
    assert "FSDP" in error.what


def test_a_proof_that_fails_stops_the_run_and_loses_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    method = METHODS["peqa"]
    model = attached(source, method)
    trainer, callback = made(model, method, tmp_path / "run", save_strategy="no")
    weight = next(iter(quant_linears(model).values())).weight_quantizer
    parts = type(weight).parts

    def spoiled(self: Any) -> Any:
        found = parts(self)
        frozen = self is weight and not self.training and not torch.is_grad_enabled()
        self.asked = getattr(self, "asked", 0) + frozen
        return found._replace(scale=found.scale * 2) if frozen and self.asked > 2 else found

    monkeypatch.setattr(type(weight), "parts", spoiled)
    with pytest.raises(MergeMismatch, match="q_proj"):
        trainer.train()
    monkeypatch.undo()
    assert callback.proof is None
    again = attached(source, method)
    ongrid.load_state(again, tmp_path / "run" / UNMERGED)
    assert_same(logits(again), logits(model))


def test_a_proof_without_a_merge_changes_nothing(source: Path):
    for method in METHODS.values():
        model = attached(source, method)
        before, weights = trainable(model), [m for m in model.modules()]
        proof = prove(model)
        assert [m for m in model.modules()] == weights
        assert all(torch.equal(p, before[n]) for n, p in trainable(model).items())
        assert merge(model) == proof
        assert prove(model) == proof


# Importing


def test_importing_the_trainer_has_no_effect_of_its_own():
    """Beside what transformers does when its Trainer and its models are imported."""
    probe = """
import json, os, random, sys, warnings
import numpy, torch
import ongrid
assert "transformers" not in sys.modules
import ongrid.hf
from transformers import Trainer
def state():
    return {
        "environment": sorted(os.environ.items()),
        "filters": [str(f) for f in warnings.filters],
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(numpy.random.get_state()),
        "python": random.getstate(),
        "threads": torch.get_num_threads(),
        "path": sys.path[:],
    }
before = state()
import ongrid.hf.trainer
after = state()
print(json.dumps([what for what in before if before[what] != after[what]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
