"""QATTrainer: a plain model in, both phases of EfficientQAT, a proved artifact out."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

import ongrid
import toy
from ongrid.errors import ConfigError, NonFiniteError, OngridError
from ongrid.export.verify import verify
from ongrid.nn import quant_linears
from ongrid.qat import QATTrainer, QATTrainingArguments

RECIPE = toy.recipe("int2.16.code.fp16")
SMALL: dict[str, Any] = {
    "block_ap_train_size": 6, "block_ap_seqlen": 12, "block_ap_batch_size": 2,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 4,
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "e2e_lr": 1e-3,
}  # fmt: skip


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, rows: int = 12) -> None:
        self.ids = toy.ids(rows, 14, seed=3)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def source(folder: Path) -> Path:
    toy.save(toy.build(), folder)
    toy.add_tokenizer(folder)
    return folder


def plain(folder: Path) -> Any:
    from ongrid.hf import load_model

    return load_model(folder)


def arguments(out: Path, **settings: Any) -> QATTrainingArguments:
    return QATTrainingArguments(str(out), **{**SMALL, **settings})


def trainer(model: Any, out: Path, recipe: Any = RECIPE, **settings: Any) -> QATTrainer:
    return QATTrainer(model, arguments(out, **settings), recipe, train_dataset=Rows())


def test_both_phases_and_the_artifact(tmp_path: Path):
    folder = source(tmp_path / "source")
    run = trainer(plain(folder), tmp_path / "run", weight_lr=1e-3)
    run.train()
    assert run.proof is not None and run.proof.differing == 0 and run.proof.matrices == 21
    begun = ongrid.Artifact.open(tmp_path / "run" / "block_ap")
    assert begun.manifest.algorithm["kind"] == "block_ap"
    model: Any = run.model
    ids = toy.ids(2, 9)
    with torch.no_grad():
        trained = model.eval()(ids, use_cache=False).logits
    run.save_model(str(tmp_path / "out"))
    assert verify(tmp_path / "out", fresh_process=False).ok
    with torch.no_grad():
        assert torch.equal(ongrid.load(tmp_path / "out")(ids, use_cache=False).logits, trained)
    merged = ongrid.Artifact.open(tmp_path / "out")
    for path in merged.manifest.matrices:  # codes are those of the first phase, scales are not
        before, after = begun.matrix(path), merged.matrix(path)
        assert torch.equal(before.parts.codes, after.parts.codes)
        assert not torch.equal(before.parts.scale, after.parts.scale)


def test_the_first_phase_is_block_ap_on_the_rows_of_the_trainer(tmp_path: Path):
    folder = source(tmp_path / "source")
    run = trainer(plain(folder), tmp_path / "run", weight_lr=1e-3, max_steps=1)
    from ongrid.hf.trainer import block_ap_batches

    batches = block_ap_batches(run, train_size=6, seqlen=12, batch_size=2)
    run.train()
    live = plain(folder)
    ongrid.quantize(live, RECIPE, batches, algorithm=ongrid.BlockAp(weight_lr=1e-3))
    begun = ongrid.load(tmp_path / "run" / "block_ap").state_dict()
    assert all(torch.equal(t, begun[n]) for n, t in live.state_dict().items())


@pytest.mark.parametrize("start", ["plain", "artifact"])
def test_the_second_phase_alone(start: str, tmp_path: Path):
    folder = source(tmp_path / "source")
    ongrid.quantize(folder, RECIPE, algorithm="rtn", out=tmp_path / "rtn")
    if start == "plain":
        run = trainer(plain(folder), tmp_path / "run", phase="e2e_qp")
    else:
        run = trainer(ongrid.load(tmp_path / "rtn"), tmp_path / "run", None, phase="e2e_qp")
    run.train()
    run.save_model(str(tmp_path / "out"))
    begun, merged = ongrid.Artifact.open(tmp_path / "rtn"), ongrid.Artifact.open(tmp_path / "out")
    for path in merged.manifest.matrices:
        assert torch.equal(begun.matrix(path).parts.codes, merged.matrix(path).parts.codes)


def test_stopped_between_the_phases_and_in_the_second(tmp_path: Path):
    """The first phase is not run again, and the second goes on from its checkpoint, bit for bit."""
    folder = source(tmp_path / "source")
    saves = {"save_strategy": "steps", "save_steps": 2.0}
    whole = trainer(plain(folder), tmp_path / "whole", **saves)
    whole.train()
    part = trainer(plain(folder), tmp_path / "part", **saves)

    class Stop(Exception): ...

    from transformers import TrainerCallback

    class Stopper(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise Stop

    part.add_callback(Stopper())
    with pytest.raises(Stop):
        part.train()
    stamp = (tmp_path / "part" / "block_ap" / "config.json").stat().st_mtime_ns
    again = trainer(plain(folder), tmp_path / "part", **saves)
    again.train(resume_from_checkpoint=True)
    assert (tmp_path / "part" / "block_ap" / "config.json").stat().st_mtime_ns == stamp
    assert again.state.global_step == 4
    assert whole.proof is not None and again.proof is not None
    assert again.proof == whole.proof


@pytest.mark.parametrize(("bits", "lr"), [(2, 2e-5), (4, 1e-5)])
def test_rates_are_resolved_by_bits(bits: int, lr: float, tmp_path: Path):
    settings = arguments(tmp_path / "run", e2e_lr=None)
    QATTrainer(toy.build(), settings, toy.recipe(f"int{bits}.16.code.fp16"))
    assert (settings.weight_lr, settings.e2e_lr, settings.quant_lr) == (lr, lr, 1e-4)


def test_defaults_are_those_of_the_published_code(tmp_path: Path):
    given = QATTrainingArguments(str(tmp_path), use_cpu=True)
    names = (
        "block_ap_train_size", "block_ap_seqlen", "block_ap_batch_size", "block_ap_epochs",
        "block_ap_min_lr_factor", "quant_lr", "per_device_train_batch_size",
        "gradient_accumulation_steps", "warmup_steps", "max_grad_norm", "weight_decay")  # fmt: skip
    assert [getattr(given, name) for name in names] == [
        4096,
        2048,
        2,
        2,
        20.0,
        1e-4,
        4,
        8,
        0.03,
        0.3,
        0.0,
    ]
    assert given.lr_scheduler_type == "cosine"


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: dict[str, Any] = {
    "learning_rate": 5e-5, "weight_decay": 0.01, "push_to_hub": True,
    "optim_target_modules": ["q_proj"], "block_ap_train_size": 0,
    "block_ap_seqlen": 0, "block_ap_batch_size": 0, "block_ap_epochs": -1,
    "block_ap_min_lr_factor": 0.5, "quant_lr": -1.0,
    "weight_lr": math.nan, "e2e_lr": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_right_effect_is_refused(name: str, tmp_path: Path):
    with pytest.raises(OngridError, match=name.removeprefix("block_ap_").replace("_size", "")):
        QATTrainingArguments(str(tmp_path / "run"), use_cpu=True, **{name: REFUSED[name]})
    assert not (tmp_path / "run").exists()


def test_all_is_refused_together(tmp_path: Path):
    with pytest.raises(ongrid.Problems) as caught:
        QATTrainingArguments(str(tmp_path), use_cpu=True, learning_rate=1e-3, weight_decay=0.1)
    assert len(caught.value.problems) == 2


def refused(match: str, model: Any, args: Any, recipe: Any = None, **more: Any) -> None:
    with pytest.raises(OngridError, match=match):
        QATTrainer(model, args, recipe, **more)


def test_models_and_arguments_that_do_not_fit(tmp_path: Path):
    args = arguments(tmp_path / "run")
    refused("not quantized", toy.build(), args)
    refused("matches nothing", toy.build(), args, {"rules": [{"match": "nothing", "grid": None}]})
    model = toy.build()
    optimizer = torch.optim.AdamW(model.parameters())
    refused("an optimizer is given", model, args, RECIPE, optimizers=(optimizer, None))
    ongrid.quantize(model, RECIPE)
    refused("quantized already", model, args, RECIPE)
    assert not (tmp_path / "run").exists()


def test_wrong_types_are_refused_where_nothing_checks_types(tmp_path: Path):
    """In a process of its own: here the tests' own type checks would be first."""
    program = f"""if True:
        from transformers import TrainingArguments
        from ongrid.errors import OngridError
        from ongrid.qat import QATTrainer, QATTrainingArguments
        out = {str(tmp_path / "run")!r}
        found = []
        for make in (
            lambda: QATTrainingArguments(out, use_cpu=True, phase="both"),
            lambda: QATTrainingArguments(out, use_cpu=True, block_ap_start="awq"),
            lambda: QATTrainer("name", TrainingArguments(out, use_cpu=True), "int4_g64"),
        ):
            try:
                make()
            except OngridError as error:
                found.append(str(error))
        assert "no phase is called 'both'" in found[0], found
        assert "no block_ap_start is called 'awq'" in found[1], found
        assert "no module" in found[2] and "expected QATTrainingArguments" in found[2], found
    """
    subprocess.run([sys.executable, "-c", program], check=True)
    assert not (tmp_path / "run").exists()


EFFECTS: dict[str, Any] = {
    "phase": "e2e_qp", "block_ap_train_size": 4, "block_ap_seqlen": 8, "block_ap_batch_size": 3,
    "block_ap_epochs": 3, "block_ap_min_lr_factor": 1.0, "block_ap_start": "mse",
    "quant_lr": 1e-3, "weight_lr": 3e-3, "e2e_lr": 3e-3, "e2e_zeros": True,
}  # fmt: skip


def test_every_argument_of_our_own_is_in_a_table():
    inherited = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    own = {f.name for f in dataclasses.fields(QATTrainingArguments) if f.name not in inherited}
    assert own == set(EFFECTS)


@pytest.mark.parametrize("name", EFFECTS)
def test_every_argument_has_an_effect(name: str, tmp_path: Path):
    """On what is merged in the end."""
    folder = source(tmp_path / "source")
    proofs = []
    for settings in ({}, {name: EFFECTS[name]}):
        settings = {"weight_lr": 1e-3, "max_steps": 2, **settings}
        run = trainer(plain(folder), tmp_path / f"run-{len(proofs)}", **settings)
        run.train()
        proofs.append(run.proof)
    assert None not in proofs and proofs[0].codes != proofs[1].codes


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_the_optimizer_is_the_one_that_is_named(optim: str, tmp_path: Path):
    model = toy.build()
    ongrid.quantize(model, RECIPE)
    run = trainer(model, tmp_path / "run", None, optim=optim, adam_beta1=0.5, max_steps=1)
    ongrid.attach(model, run._method)
    optimizer = run.create_optimizer()
    assert optim.removesuffix("_torch") == type(optimizer).__name__.lower()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(quant_linears(model))
    assert all(group["lr"] == 1e-3 for group in optimizer.param_groups)
    if optim == "adamw_torch":
        assert optimizer.param_groups[0]["betas"][0] == 0.5


def test_a_loss_that_is_not_finite_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = toy.build()
    ongrid.quantize(model, RECIPE)
    run = trainer(model, tmp_path / "run", None)
    with torch.no_grad():
        next(m for m in model.modules() if type(m) is nn.Embedding).weight.fill_(math.inf)
    with pytest.raises(NonFiniteError, match="in step 0"):
        run.train()


def test_importing_the_library_does_not_bring_transformers():
    program = "import sys, ongrid; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_config_error_is_what_is_raised(tmp_path: Path):
    with pytest.raises(ConfigError):
        QATTrainingArguments(str(tmp_path), use_cpu=True, learning_rate=1.0)
