"""SignRound: learns where each weight rounds to and where each block is clipped, by signed steps.

Cheng, Zhang, Shen, Cai, He, Lv, Liu: "Optimize Weight Rounding via Signed Gradient Descent for the
Quantization of LLMs" (2023), known as AutoRound. In this house's letters, on the engine of
`blockwise.py`, with lo <= 0 <= hi the range of a block:

    s = (a hi - b lo) / (v_max - v_min),  z from b lo,      a and b in [0, 1] for each block
    codes = encode(w + o s, s, z),                          o in [-1/2, 1/2] for each weight

o starts at 0, a and b at 1, so that the start is plain rounding. Each step moves all three by the
learning rate against the sign of the gradient; the rate falls linearly to 0, and is 1 / steps at
first, so that every offset can just reach its bounds. The best step is kept.

Differences from the published tool: batches come in turn, not at random; a step's loss is compared
with what the same batch lost at the start, since batches differ; padding does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ongrid.calibrate.blockwise import AbstractBlockwise, Trained
from ongrid.errors import ConfigError
from ongrid.grid import Parts, ops
from ongrid.nn import AbstractWeight, CodedWeight, LatentWeight, quant_linears

_HALF = 0.5


@dataclass(frozen=True)
class SignRound(AbstractBlockwise):
    """AutoRound's learned rounding and clipping.

    `iters`: steps a layer. `lr`: of the offsets, in steps of the grid, by default 1 / iters.
    `range_lr`: of the shares of the range, by default the same. 0 iters leave the start. Further
    settings, laws and errors are those of `AbstractBlockwise`.
    """

    iters: int = 200
    lr: float | None = None
    range_lr: float | None = None
    keeps_best_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iters < 0:
            raise ConfigError(f"iters must be at least 0, not {self.iters}", where="signround")
        for name, rate in (("lr", self.lr), ("range_lr", self.range_lr)):
            if rate is not None and not 0 <= rate <= 1:
                raise ConfigError(f"{name} must be from 0 to 1, not {rate}", where="signround")

    def steps(self, batches: int) -> int:
        return self.iters

    def rate(self, step: int, steps: int) -> float:
        return 1 - step / steps

    def trained(self, layer: nn.Module, weights: Mapping[str, LatentWeight]) -> Trained:
        lr = 1 / max(self.iters, 1) if self.lr is None else self.lr
        linears = quant_linears(layer)
        rounded = {path: RoundedWeight(weight) for path, weight in weights.items()}
        for path, weight in rounded.items():
            linears[path].weight_quantizer = weight.requires_grad_()
        offsets = [weight.offset for weight in rounded.values()]
        shares = [share for w in rounded.values() for share in (w.up, w.down) if share is not None]
        range_lr = lr if self.range_lr is None else self.range_lr

        def finish() -> None:
            for path, weight in rounded.items():
                linears[path].weight_quantizer = weight.latent_weight()

        groups = [
            {"params": offsets, "lr": lr, "bounds": (-_HALF, _HALF)},
            {"params": shares, "lr": range_lr, "bounds": (0.0, 1.0)},
        ]
        return Trained(
            [(p, p) for p in (*offsets, *shares)],
            SignedDescent([group for group in groups if group["params"]]),
            finish,
        )


class RoundedWeight(AbstractWeight):
    """A fixed matrix whose rounding trains: an offset for each weight, in steps of the grid, and
    for each block the shares of its range that the grid covers.

    It starts as the weight that it is made from. `up` and `down` are None where nothing of the kind
    trains: a grid without a zero has one share, and scales on a grid of their own have none.
    """

    def __init__(self, start: LatentWeight) -> None:
        super().__init__(start.grid, start.shape, start.dtype)
        self.start = CodedWeight(start.freeze(), start.dtype)  # for its scale and zero
        self.scale = self.start.scale if isinstance(self.start.scale, AbstractWeight) else None
        self.latent: Tensor
        self.register_buffer("latent", start.latent.detach())
        self.offset = nn.Parameter(torch.zeros_like(self.latent, dtype=torch.float32))
        whole = torch.ones(start.grid.blocks.counts(start.shape), device=self.latent.device)
        trains = isinstance(start.grid.scale, torch.dtype)
        self.up = nn.Parameter(whole) if trains else None
        self.down = nn.Parameter(whole.clone()) if trains and start.zero is not None else None
        self.requires_grad_(False)  # until it is asked to

    def source(self) -> Float[Tensor, "out in"]:
        return self.latent.to(self.dtype)

    def parts(self) -> Parts:
        name = self._grid_string
        scale, zero = self.start.stored_range()
        if self.up is not None:
            assert isinstance(scale, Tensor)
            wide = None if zero is None else zero.float()
            s, z = ops.shrink(scale.float(), wide, self.up, self.down, name)
            scale = ops.store_scale(s, name)
            zero = None if self.down is None else ops.store_zero(z, name)
        moved = ops.offset(self.latent, self.offset, self._effective(scale))
        return Parts(ops.encode(moved, self._effective(scale), zero, None, name), scale, zero)

    @torch.no_grad()
    def latent_weight(self) -> LatentWeight:
        """The same weight with the offsets taken in: it freezes to the same parts."""
        stored = self.freeze().parts
        moved = ops.offset(self.latent, self.offset, self.grid.scales(stored.scale))
        return LatentWeight(self.grid, moved, self.dtype, (stored.scale, stored.zero))


class SignedDescent(torch.optim.Optimizer):
    """Moves each number by the learning rate against the sign of its gradient, within bounds."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"]).clamp_(*group["bounds"])
        return loss
