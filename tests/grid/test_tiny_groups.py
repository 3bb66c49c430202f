"""T02 of the users' list: empty and tiny groups, and one number that dwarfs its group."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ongrid.grid import Grid, QTensor
from ongrid.nn import CodedWeight, LatentWeight, QuantLinear, freeze

ZEROS = {"sym": "int{}.32.sym.{}", "code": "int{}.32.code.{}", "shift": "uint{}.32.shift.{}"}
NAMES = [
    ZEROS[zero].format(bits, scale)
    for zero, bits, scale in itertools.product(ZEROS, (2, 3, 4, 8), ("fp16", "bf16", "fp32"))
]
each = pytest.mark.parametrize("name", NAMES)


def weight() -> Tensor:
    """8 x 64, groups of 32."""
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    w[0, :32] = 0
    w[1, :32] = torch.linspace(-1e-8, 1e-8, 32)
    w[1, :32][w[1, :32] == 0] = 1e-9
    w[2, 32:] = 0.5
    w[3, :32] = 1e-3
    w[3, 7] = 1e4
    return w


def test_the_matrix_is_the_one_described():
    w = weight()
    assert tuple(w.shape) == (8, 64)
    assert bool((w[0, :32] == 0).all())
    assert bool((w[1, :32] != 0).all()) and float(w[1, :32].abs().max()) <= 1e-8 * (1 + 1e-6)
    assert sorted(w[3, :32].unique().tolist()) == pytest.approx([1e-3, 1e4])


@each
def test_scales_are_finite_and_positive(name: str):
    q = QTensor.rounded(Grid.parse(name), weight())
    assert isinstance(q.parts.scale, Tensor)
    assert q.parts.scale.dtype == q.grid.scale
    assert bool((q.parts.scale.isfinite() & (q.parts.scale > 0)).all())
    q.check()


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_group_of_zeros_decodes_to_zeros(name: str, dtype: torch.dtype):
    q = QTensor.rounded(Grid.parse(name), weight(), dtype)
    assert torch.equal(q.dequantize(dtype)[0, :32], torch.zeros(32, dtype=dtype))


@each
def test_no_number_moves_by_more_than_one_step_of_its_stored_scale(name: str):
    """Half a step of rounding, and less than another half where the range itself was rounded: its
    255 steps at most, times 2**-9 of them with bf16 scales, or half a step for a zero code.
    """
    w = weight()
    q = QTensor.rounded(Grid.parse(name), w)
    assert isinstance(q.parts.scale, Tensor)
    steps = (q.dequantize(torch.float32).double() - w.double()).abs().reshape(8, 2, 32)
    steps /= q.parts.scale.double()[..., None]
    steps[q.parts.scale == 1] = 0  # stands for a scale that is not representable
    assert float(steps.max()) <= 1
    stands = (q.parts.scale == 1).sum()
    assert int(stands) == (2 if q.grid.scale == torch.float16 else 1)


@each
def test_underflow_gives_zeros_and_is_counted(name: str):
    w, grid = weight(), Grid.parse(name)
    q = QTensor.rounded(grid, w)
    tiny = q.dequantize(torch.float32)[1, :32]
    if grid.scale == torch.float16:  # the smallest scale is 6e-8
        assert torch.equal(tiny, torch.zeros(32))
        assert grid.vanished(w, q.parts) == 1
    else:
        assert bool((tiny != 0).any()) and bool(tiny.isfinite().all())
        assert grid.vanished(w, q.parts) == 0


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_before_saving_is_forward_after_loading(name: str, dtype: torch.dtype):
    grid, w = Grid.parse(name), weight().to(dtype)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = torch.nn.Sequential(QuantLinear(LatentWeight(grid, w)))
    trained = model(x)
    freeze(model)
    state = {key: t.clone() for key, t in model.state_dict().items()}
    assert state.keys() == {f"0.weight_quantizer.{n}" for n in QTensor.rounded(grid, w).tensors()}
    loaded = torch.nn.Sequential(QuantLinear(CodedWeight.empty(grid, (8, 64), dtype)))
    assert not torch.equal(loaded(x), trained)
    loaded.load_state_dict(state, strict=True)
    assert torch.equal(model(x), trained)
    assert torch.equal(loaded(x), trained)
