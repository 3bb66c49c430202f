"""Block-AP: trains all parameters of one decoder layer at a time on its quantization grid.

Chen, Shao, Xu, Wang, Zhang, Gao, Qiao, Luo: "EfficientQAT: Efficient Quantization-Aware Training
for Large Language Models" (2024), the first of its two phases; defaults are those of its published
code. In this house's letters, on the engine of `blockwise.py`:

    W, s, z and the layer's norms fall along the gradient of the layer's loss by AdamW without
    weight decay; straight through the rounding, gradients as in `grid/ops.py`
    lr_t = lr (1/f + (1 - 1/f) (1 + cos(pi t / T)) / 2),   f = 20, over all T steps

Differences from the published code: padding does not count; masters are fp32, and each forward is
computed in the model's own dtype on exactly what would be stored (there: float16 autocast); what
makes a layer worse is undone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ongrid.calibrate.blockwise import AbstractBlockwise, Trained
from ongrid.errors import ConfigError
from ongrid.nn import LatentWeight

_BITS_OF_LITTLE_PRECISION = 2


@dataclass(frozen=True)
class BlockAp(AbstractBlockwise):
    """EfficientQAT's training of whole layers: weights, scales, zeros and norms.

    `epochs`: passes over the batches. `weight_lr`: of weights and norms; by default 1e-5, and 2e-5
    in a layer that has a weight of 2 bits. `quant_lr`: of scales and zeros. `min_lr_factor`: what
    the rates are divided by in the end. 0 epochs leave the start. Further settings, laws and errors
    are those of `AbstractBlockwise`.
    """

    epochs: int = 2
    weight_lr: float | None = None
    quant_lr: float = 1e-4
    min_lr_factor: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs < 0:
            raise ConfigError(f"epochs must be at least 0, not {self.epochs}", where="block_ap")
        for name, rate in (("weight_lr", self.weight_lr), ("quant_lr", self.quant_lr)):
            if rate is not None and not 0 <= rate < math.inf:
                raise ConfigError(f"{name} must be at least 0, not {rate}", where="block_ap")
        if not self.min_lr_factor >= 1:
            raise ConfigError(
                f"min_lr_factor must be at least 1, not {self.min_lr_factor}", where="block_ap"
            )

    def also_trains(self, layer: nn.Module) -> list[str]:
        return _norms(layer) if self.epochs else []

    def steps(self, batches: int) -> int:
        return self.epochs * batches

    def rate(self, step: int, steps: int) -> float:
        least = 1 / self.min_lr_factor
        return least + (1 - least) * (1 + math.cos(math.pi * step / steps)) / 2

    def trained(self, layer: nn.Module, weights: Mapping[str, LatentWeight]) -> Trained:
        fine = any(w.grid.levels.bits <= _BITS_OF_LITTLE_PRECISION for w in weights.values())
        weight_lr = (2e-5 if fine else 1e-5) if self.weight_lr is None else self.weight_lr
        latents = [weight.latent for weight in weights.values()]
        grids = [p for w in weights.values() for n, p in w.named_parameters() if n != "latent"]
        norms = [layer.get_parameter(name) for name in _norms(layer)]
        masters = [nn.Parameter(norm.detach().to(torch.float32, copy=True)) for norm in norms]
        # Those of a layer that its owner does not train are asked for gradients just the same.
        trains = [norm.requires_grad for norm in norms]
        for parameter in (*latents, *grids, *norms):
            parameter.requires_grad_()

        def finish() -> None:
            for parameter in (*latents, *grids):
                parameter.requires_grad_(False)
            for norm, before in zip(norms, trains, strict=True):
                norm.requires_grad_(before)

        groups = [
            {"params": [*latents, *masters], "lr": weight_lr},
            {"params": grids, "lr": self.quant_lr},
        ]
        return Trained(
            [(p, p) for p in (*latents, *grids)] + list(zip(norms, masters, strict=True)),
            torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=0.0, fused=True),
            finish,
        )


def _norms(layer: nn.Module) -> list[str]:
    """Parameters that scale features: the weights of one dimension."""
    return [
        name
        for name, parameter in layer.named_parameters()
        if name.rpartition(".")[2] == "weight" and parameter.dim() == 1
    ]
