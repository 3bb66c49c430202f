"""EfficientQAT as a Hugging Face Trainer: a plain model in, a quantized and tuned artifact out.

    trainer = QATTrainer(
        model,  # as transformers loads it
        quant_config="int2_g64",
        args=QATTrainingArguments("out", block_ap_train_size=512, block_ap_seqlen=512),
        train_dataset=data,
        data_collator=collator,
    )
    trainer.train()          # Block-AP, codes fixed, scales trained end to end, and the proof
    trainer.save_model()     # the merged artifact

Chen et al., "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models" (2024);
defaults are those of its published code. A door, because it goes through both others: quantizing
and merging.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from ongrid.calibrate.block_ap import BlockAp
from ongrid.calibrate.blockwise import Start
from ongrid.errors import ConfigError, NonFiniteError, OngridError, raise_all
from ongrid.finetune import merge
from ongrid.nn import quant_linears
from ongrid.quantize import plan, quantize
from ongrid.recipe import Plan, Recipe
from ongrid.tune.merge import MergeProof
from ongrid.tune.method import Peqa, attach, parameter_groups

Phase = Literal["block_ap", "e2e_qp"]

BLOCK_AP_FOLDER = "block_ap"
"""Where in the output folder the artifact lies that end-to-end training starts from."""

_HF_LEARNING_RATE = 5e-5
_FINE_BITS = 2


@dataclass
class QATTrainingArguments(TrainingArguments):
    """Settings of `QATTrainer`, beside those of transformers.

    `phase`: `block_ap` runs both phases, `e2e_qp` the second alone, from plain rounding or from an
    artifact. `block_ap_train_size` rows of `block_ap_seqlen` tokens, `block_ap_batch_size` to a
    step, train each block for `block_ap_epochs` epochs, weights and norms at `weight_lr`, scales
    and zeros at `quant_lr`, by a cosine that ends at the rate over `block_ap_min_lr_factor`.
    `block_ap_start`: what a block starts from. End-to-end training moves scales (and zeros, with
    `e2e_zeros`) at `e2e_lr`. `weight_lr` and `e2e_lr` are 1e-5 by default, and 2e-5 where a matrix
    has 2 bits; what they came to is in the Trainer's `args`, and is logged.

    Raises `ConfigError` for everything that would have no effect, or none that is right.
    """

    phase: Phase = "block_ap"
    block_ap_train_size: int = 4096
    block_ap_seqlen: int = 2048
    block_ap_batch_size: int = 2
    block_ap_epochs: int = 2
    block_ap_min_lr_factor: float = 20.0
    block_ap_start: Start = "rtn"
    quant_lr: float = 1e-4
    weight_lr: float | None = None
    e2e_lr: float | None = None
    e2e_zeros: bool = False
    # Those of transformers that have another default here.
    learning_rate: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 8
    num_train_epochs: float = 1.0
    lr_scheduler_type: Any = "cosine"
    warmup_steps: float = 0.03
    max_grad_norm: float = 0.3
    save_strategy: Any = field(default="no")

    def __post_init__(self) -> None:
        raise_all(self._problems())
        self.learning_rate = _HF_LEARNING_RATE  # transformers wants a number; nothing uses it
        super().__post_init__()

    def _problems(self) -> list[OngridError]:
        counts = ("block_ap_train_size", "block_ap_seqlen", "block_ap_batch_size")
        problems: list[OngridError] = [
            ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
            for name in counts
            if getattr(self, name) < 1
        ]
        for name, value, known in (
            ("phase", self.phase, get_args(Phase)),
            ("block_ap_start", self.block_ap_start, get_args(Start)),
        ):
            if value not in known:
                remedy = f"Known: {', '.join(known)}."
                problems.append(ConfigError(f"no {name} is called {value!r}", remedy=remedy))
        refused = {
            "learning_rate": (self.learning_rate is not None, "Set e2e_lr, weight_lr or quant_lr."),
            "weight_decay": (self.weight_decay != 0, "No scale or zero may decay towards 0."),
            "push_to_hub": (self.push_to_hub, "Save the artifact, and upload its folder."),
            "optim_target_modules": (
                self.optim_target_modules is not None,
                "What trains is scales; use an optimizer that takes all of them.",
            ),
            "fsdp": (bool(self.fsdp), "Train with DDP or on one device."),
            "deepspeed": (self.deepspeed is not None, "Train with DDP or on one device."),
        }
        for name, (given, remedy) in refused.items():
            if given:
                what = f"{name} is {getattr(self, name)!r}, which has no right effect here"
                problems.append(ConfigError(what, remedy=remedy))
        try:
            self.block_ap()
        except OngridError as error:
            problems.append(error)
        if self.e2e_lr is not None and not 0 < self.e2e_lr < math.inf:
            problems.append(ConfigError(f"e2e_lr must be above 0, not {self.e2e_lr}"))
        return problems

    def block_ap(self) -> BlockAp:
        """The algorithm of the first phase."""
        return BlockAp(
            start=self.block_ap_start,
            epochs=self.block_ap_epochs,
            weight_lr=self.weight_lr,
            quant_lr=self.quant_lr,
            min_lr_factor=float(self.block_ap_min_lr_factor),
        )

    def resolve(self, bits: int) -> None:
        """Fills in the rates that depend on the fewest bits of a matrix."""
        usual = 2e-5 if bits <= _FINE_BITS else 1e-5
        self.weight_lr = usual if self.weight_lr is None else self.weight_lr
        self.e2e_lr = usual if self.e2e_lr is None else self.e2e_lr


class QATTrainer(Trainer):
    """Trains a causal language model on its quantization grid, and proves what comes out.

    `model` is a plain transformers model together with `quant_config` (a recipe: its name, file,
    dictionary or object), or one that was loaded from an artifact, without; that starts with the
    second phase. Everything else is as in `Trainer`; the data of the first phase is the first rows
    of `train_dataset`. Refusals come before any computation, all together.

    `train()` leaves `proof`, the `MergeProof` of its end. Its first phase writes
    `OUTPUT/block_ap`, an artifact, and goes on there when it was stopped; checkpoints of the second
    hold the unmerged masters, and `resume_from_checkpoint` goes on from them. `save_model()` merges
    and writes an artifact: afterwards the model serves and does not train.
    """

    def __init__(
        self,
        model: nn.Module,
        args: QATTrainingArguments,
        quant_config: str | Path | Mapping[str, Any] | Recipe | None = None,
        **trainer: Any,
    ) -> None:
        self._recipe: Recipe | None = None
        self._source: Path | None = None
        self.proof: MergeProof | None = None
        bits = self._checked(model, args, quant_config, trainer)
        args.resolve(bits)
        from ongrid.hf.trainer import GridCallback

        self._method = Peqa(zeros=args.e2e_zeros, lr=float(args.e2e_lr or 0))
        self._watch = GridCallback(self._method)
        super().__init__(model=model, args=args, **trainer)
        self.add_callback(self._watch)

    def _checked(
        self,
        model: nn.Module,
        args: QATTrainingArguments,
        quant_config: Any,
        trainer: Mapping[str, Any],
    ) -> int:
        """The fewest bits of a matrix; every problem that can be known by now, in one error."""
        problems: list[OngridError] = []
        linears = quant_linears(model) if isinstance(model, nn.Module) else {}
        found: list[int] = [w.weight_quantizer.grid.levels.bits for w in linears.values()]
        if not isinstance(model, nn.Module):
            problems.append(ConfigError(f"`model` is a {type(model).__name__}, no module"))
        if not isinstance(args, QATTrainingArguments):
            what = f"`args` are {type(args).__name__}, expected QATTrainingArguments"
            problems.append(ConfigError(what))
        elif args.world_size > 1 and args.phase == "block_ap" and not linears:
            problems.append(
                ConfigError(
                    f"Block-AP runs in one process, here are {args.world_size}",
                    remedy="Run `ongrid quantize --algorithm block_ap` first, and tune what it "
                    "wrote in several processes.",
                )
            )
        if trainer.get("optimizers", (None, None))[0] is not None:
            remedy = "Set `optim` and its arguments: what trains exists after Block-AP only."
            problems.append(ConfigError("an optimizer is given", remedy=remedy))
        if linears and quant_config is not None:
            remedy = "Leave `quant_config` out, or start from the float model."
            problems.append(ConfigError("the model is quantized already", remedy=remedy))
        if not linears and quant_config is None:
            remedy = "Give `quant_config`, such as int4_g64, or load an artifact."
            problems.append(ConfigError("the model is not quantized", remedy=remedy))
        elif quant_config is not None and not linears and isinstance(model, nn.Module):
            try:
                self._recipe = Recipe.load(quant_config)
                found = _bits(plan(model, self._recipe))
            except OngridError as error:
                problems.append(error)
        raise_all(problems)
        return min(found)

    # ---- the two phases --------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the phases; see the class. Arguments and result are those of `Trainer.train`."""
        given: Any = self.args
        model = self._bare()
        if self._recipe is not None:
            rates = ("weight_lr", "quant_lr", "e2e_lr")
            self.log({name: getattr(given, name) for name in rates})
            self._source = Path(str(given.output_dir)) / BLOCK_AP_FOLDER
            self._quantize(model, self._recipe, self._source)
            self._recipe = None
        weights = [linear.weight_quantizer for linear in quant_linears(model).values()]
        if not any(True for weight in weights for _ in weight.parameters()):
            attach(model, self._method)
        result = super().train(*args, **kwargs)
        self.proof = self._watch.proof
        return result

    def _quantize(self, model: nn.Module, recipe: Recipe, out: Path) -> None:
        from ongrid.hf.trainer import block_ap_batches

        args: Any = self.args
        if args.phase == "e2e_qp":
            quantize(model, recipe, out=out)
            return
        batches = block_ap_batches(
            self,
            train_size=args.block_ap_train_size,
            seqlen=args.block_ap_seqlen,
            batch_size=args.block_ap_batch_size,
        )
        quantize(model, recipe, batches, algorithm=args.block_ap(), out=out)

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """The optimizer that `optim` names, over what the method trains and nothing else."""
        if self.optimizer is None:
            bare: Any = self._bare()
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, bare)
            settings.pop("lr", None)
            groups = parameter_groups(bare, self._method)
            self.optimizer = kind(groups, lr=self._method.lr, **settings)
        return self.optimizer

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`; raises `NonFiniteError` for a loss that is not finite."""
        result = super().compute_loss(*args, **kwargs)
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        if not bool(loss.isfinite()):
            raise NonFiniteError(
                f"the loss is {float(loss.detach())} in step {self.state.global_step}",
                remedy="Train at a lower e2e_lr. The last checkpoint is intact.",
            )
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Merges the model with a proof, and writes it as an artifact to the output folder.

        The folder of the run itself holds `block_ap` and checkpoints, so without `output_dir` the
        artifact lies in its subfolder `merged`.
        """
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
        elif self.args.should_save:
            out = Path(output_dir or Path(str(self.args.output_dir)) / "merged")
            self.proof = merge(self._bare(), out, source=self._source, overwrite=True)

    def _bare(self) -> nn.Module:
        assert self.model is not None
        return self.accelerator.unwrap_model(self.model)


def _bits(resolved: Plan) -> list[int]:
    return [
        spec.grid.levels.bits
        for path, spec in resolved.quantizers.items()
        if path.endswith("weight_quantizer")
    ]
