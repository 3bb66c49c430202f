"""QuantLinear and the surgery: insert, freeze, load, bypass, hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from laws.table import DTYPES, assert_same
from ongrid.errors import CalibrationError, GridError, StructureError
from ongrid.grid import Grid, QTensor
from ongrid.nn import (
    CodedWeight,
    LatentWeight,
    LinearSite,
    OtherWeight,
    QuantizerSpec,
    QuantLinear,
    bypassed,
    find_linears,
    find_others,
    freeze,
    group_by_linear,
    held,
    insert,
    insert_empty,
    place,
    quant_linears,
)

INT4 = QuantizerSpec(Grid.parse("int4.8.code.fp16"))
NVFP4 = QuantizerSpec(Grid.parse("e2m1.16.sym.[e4m3.tensor.sym.fp32]"))
INT8 = QuantizerSpec(Grid.parse("int8.channel.sym.fp32"), dynamic=True)
STATIC = QuantizerSpec(Grid.parse("e4m3.tensor.sym.fp32"))

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Conv1D(nn.Module):
    """GPT-2's: y = x W + b, with W stored `[in out]`."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(into, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.mix = Conv1D(24, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x + self.down(self.up(x).relu())))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def specs(**of: QuantizerSpec) -> dict[str, QuantizerSpec]:
    """Specs of weights, by the linear's name."""
    return {f"{name}.weight_quantizer": spec for name, spec in of.items()}


def quantized(block: Block, **of: QuantizerSpec) -> Block:
    insert(block, specs(**of), find_linears(block, [Conv1D]))
    return block


# QuantLinear


@each_dtype
def test_forward_is_a_linear_with_the_dequantized_weight(dtype: torch.dtype):
    w, bias = torch.randn(6, 16, dtype=dtype), nn.Parameter(torch.randn(6, dtype=dtype))
    x = torch.randn(2, 3, 16, dtype=dtype)
    stored = QTensor.rounded(INT4.grid, w).dequantize(dtype)
    for b in (bias, None):
        layer = QuantLinear(LatentWeight(INT4.grid, w), b)
        assert_same(layer(x), linear(x, stored, b))
        assert_same(layer.weight, stored)
    assert (layer.in_features, layer.out_features) == (16, 6)


def test_input_and_output_quantizers_stand_around_the_product():
    block = quantized(Block(), up=INT4)
    insert_specs = {"up.weight_quantizer": INT4, "up.input_quantizer": INT8}
    insert_specs |= {
        "up.output_quantizer": QuantizerSpec(Grid.parse("e4m3.channel.sym.fp32"), True)
    }
    other = Block()
    insert(other, insert_specs, find_linears(other))
    layer = other.up
    assert isinstance(layer, QuantLinear) and isinstance(block.up, QuantLinear)
    x = torch.randn(5, 16)
    plain = QuantLinear(layer.weight_quantizer, layer.bias)
    expected = Grid.parse("e4m3.channel.sym.fp32").snap(plain(INT8.grid.snap(x)))
    assert_same(layer(x), expected)
    assert not torch.equal(layer(x), plain(x))


def test_the_weight_is_read_only():
    layer = QuantLinear(LatentWeight(INT4.grid, torch.randn(4, 16)))
    with pytest.raises((AttributeError, KeyError)):
        layer.weight = nn.Parameter(torch.zeros(4, 16))  # pyright: ignore[reportAttributeAccessIssue]


# Finding


def test_find_linears_gives_paths_and_sizes():
    model = nn.ModuleDict({"a": Block(), "head": nn.Linear(16, 7)})
    assert find_linears(model) == {
        "a.up": LinearSite(32, 16, transposed=False),
        "a.down": LinearSite(16, 32, transposed=False),
        "head": LinearSite(7, 16, transposed=False),
    }
    found = find_linears(model, [Conv1D])
    assert found["a.mix"] == LinearSite(24, 16, transposed=True)
    assert found["a.mix"].shape == (24, 16)
    assert find_linears(nn.LayerNorm(4)) == {}


def test_find_linears_finds_quantized_ones_too():
    block = Block()
    before = find_linears(block, [Conv1D])
    quantized(block, up=INT4, mix=INT4)
    after = find_linears(block, [Conv1D])
    assert after["up"] == before["up"]
    assert after["mix"] == LinearSite(24, 16, transposed=False)  # it is turned now
    assert set(quant_linears(block)) == {"up", "mix"}


class Router(nn.Linear):
    """Computes more than a product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


class Named(nn.Linear):
    """Another name, and the same forward."""


class Written(nn.Linear):
    """The same product, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 16))
        self.scale = nn.Parameter(torch.randn(16))


def test_only_what_computes_as_a_linear_is_one():
    model = nn.ModuleDict(
        {
            "router": Router(16, 4),
            "named": Named(16, 8),
            "written": Written(16, 8),
            "experts": Experts(),
            "mix": Conv1D(24, 16),
            "codes": nn.Linear(16, 8),
        }
    )
    codes = torch.zeros(8, 16, dtype=torch.int8)
    model.codes.weight = nn.Parameter(codes, requires_grad=False)
    sites = find_linears(model, [Conv1D], [Written])
    assert sites == {
        "named": LinearSite(8, 16, transposed=False),
        "written": LinearSite(8, 16, transposed=False),
        "mix": LinearSite(24, 16, transposed=True),
    }
    assert "written" not in find_linears(model)
    others = find_others(model, sites)
    why = "computes in its own way, not as a linear layer"
    fused = f"Experts {why} (fused experts are not supported yet)"
    assert others == {
        "router.weight": OtherWeight((4, 16), f"Router {why}"),
        "experts.up": OtherWeight((3, 8, 16), fused),
        "codes.weight": OtherWeight((8, 16), "its numbers are torch.int8 already"),
    }


def test_nothing_of_a_quantized_linear_is_another_weight():
    block = quantized(Block(), up=INT4, mix=NVFP4)
    assert find_others(block, find_linears(block, [Conv1D])) == {}


def test_specs_are_grouped_by_linear():
    grouped = group_by_linear(
        {"a.b.weight_quantizer": INT4, "a.b.input_quantizer": INT8, "c.weight_quantizer": NVFP4}
    )
    assert grouped == {
        "a.b": {"weight_quantizer": INT4, "input_quantizer": INT8},
        "c": {"weight_quantizer": NVFP4},
    }


# Inserting


def test_insert_keeps_the_weight_and_the_bias_themselves():
    block = Block()
    weight, bias, down = block.up.weight, block.up.bias, block.down
    quantized(block, up=INT4)
    layer = quant_linears(block)["up"]
    assert isinstance(layer.weight_quantizer, LatentWeight)
    assert layer.weight_quantizer.latent is weight
    assert layer.bias is bias
    assert block.down is down and type(block.mix) is Conv1D
    assert_same(layer.weight, INT4.grid.snap(weight.detach()))


def test_insert_without_a_bias():
    layer = quant_linears(quantized(Block(), down=INT4))["down"]
    assert layer.bias is None
    assert "down.bias" not in layer.state_dict()


def test_insert_turns_a_transposed_weight():
    block, x = Block(), torch.randn(3, 16)
    conv = block.mix
    quantized(block, mix=INT4)
    layer = quant_linears(block)["mix"]
    assert layer.weight_quantizer.shape == (24, 16)
    stored = INT4.grid.snap(conv.weight.detach().T.contiguous())  # groups run along the input
    assert_same(layer.weight, stored)
    assert_same(layer(x), linear(x, stored, conv.bias))


@pytest.mark.parametrize("grad", [True, False])
def test_insert_changes_no_requires_grad_of_the_weight(grad: bool):
    block = Block()
    block.requires_grad_(grad)
    for layer in quant_linears(quantized(block, up=INT4, mix=INT4)).values():
        assert isinstance(layer.weight_quantizer, LatentWeight)
        assert layer.weight_quantizer.latent.requires_grad == grad


def test_a_quantized_linear_is_not_quantized_again():
    block = quantized(Block(), up=INT4)
    layer = block.up
    with pytest.raises(StructureError, match="up: this linear is quantized already"):
        quantized(block, up=INT4)
    freeze(block)
    with pytest.raises(StructureError, match="quantized already"):
        quantized(block, up=INT4)
    assert block.up is layer


def test_a_misfit_is_refused_and_nothing_is_replaced():
    block = Block()
    with pytest.raises(GridError, match="16 columns do not divide into blocks of 64"):
        quantized(block, up=QuantizerSpec(Grid.parse("int4.64.sym.fp16")))
    assert type(block.up) is nn.Linear


def test_place():
    model = nn.Sequential(nn.ModuleDict({"a": nn.Identity()}), nn.Identity())
    new = nn.Linear(1, 1), nn.Linear(1, 1)
    place(model, "0.a", new[0])
    place(model, "1", new[1])
    assert (model.get_submodule("0.a"), model[1]) == new


# Freezing and loading


@each_dtype
def test_freeze_changes_no_output_and_leaves_what_an_artifact_stores(dtype: torch.dtype):
    block = quantized(Block().to(dtype), up=INT4, down=NVFP4, mix=INT4)
    x = torch.randn(3, 16, dtype=dtype)
    before = block(x)
    frozen = freeze(block)
    assert_same(block(x), before)
    assert frozen.keys() == {"up", "down", "mix"}
    expected = {
        f"{path}.weight_quantizer.{name}": t
        for path, q in frozen.items()
        for name, t in q.tensors().items()
    }
    state = block.state_dict()
    assert {n for n in state if "quantizer" in n} == expected.keys()
    for name, t in expected.items():
        assert_same(state[name], t)
    assert all(isinstance(q.weight_quantizer, CodedWeight) for q in quant_linears(block).values())
    again = freeze(block)
    assert all(again[path].compare(q).total == 0 for path, q in frozen.items())


@each_dtype
def test_an_empty_model_loads_a_frozen_state_strictly(dtype: torch.dtype):
    of = specs(up=INT4, down=NVFP4, mix=INT4)
    of |= {"up.input_quantizer": STATIC, "down.input_quantizer": INT8}
    block = Block().to(dtype)
    sites = find_linears(block, [Conv1D])
    insert(block, of, sites)
    quantizer = quant_linears(block)["up"].input_quantizer
    assert quantizer is not None
    quantizer.set_range(torch.tensor([[-3.0]]), torch.tensor([[3.0]]), dtype)
    freeze(block)
    loaded = Block().to(dtype)
    insert_empty(loaded, of, sites)
    loaded.load_state_dict(block.state_dict(), strict=True)
    x = torch.randn(3, 16, dtype=dtype)
    assert_same(loaded(x), block(x))


def test_a_static_quantizer_without_a_range_stops_the_layer():
    block = Block()
    of = {**specs(up=INT4), "up.input_quantizer": STATIC}
    insert(block, of, find_linears(block))
    with pytest.raises(CalibrationError, match="never calibrated"):
        block(torch.randn(3, 16))
    with bypassed(block, activations=True):
        block(torch.randn(3, 16))


# Contexts


def test_bypassed_computes_with_the_float_weights():
    block, x = Block(), torch.randn(3, 16)
    plain = block(x)
    of = {**specs(up=INT4, down=NVFP4), "up.input_quantizer": INT8}
    insert(block, of, find_linears(block))
    rounded = block(x)
    assert not torch.equal(rounded, plain)
    with bypassed(block, activations=True):
        assert_same(block(x), plain)
    with bypassed(block, activations=False):
        mixed = block(x)
        with bypassed(block, activations=True):
            assert_same(block(x), plain)
        assert_same(block(x), mixed)  # the inner context ends, the outer one does not
    assert not torch.equal(mixed, plain) and not torch.equal(mixed, rounded)
    assert_same(block(x), rounded)


def test_bypassed_ends_with_an_error_too():
    block, x = quantized(Block(), up=INT4), torch.randn(3, 16)
    rounded = block(x)
    with pytest.raises(ZeroDivisionError), bypassed(block, activations=True):
        raise ZeroDivisionError
    assert_same(block(x), rounded)


def test_bypassed_needs_weights_that_are_still_there():
    block = quantized(Block(), up=INT4)
    freeze(block)
    with (
        pytest.raises(GridError, match="the unquantized weight is gone"),
        bypassed(block, activations=False),
    ):
        block(torch.randn(3, 16))


def test_freeze_is_the_same_while_bypassed():
    block = quantized(Block(), up=INT4, down=NVFP4)
    plain = {p: q.weight_quantizer.freeze() for p, q in quant_linears(block).items()}
    with bypassed(block, activations=True):
        for path, layer in quant_linears(block).items():
            assert layer.weight_quantizer.freeze().compare(plain[path]).total == 0


def test_held_decodes_every_weight_once(monkeypatch: pytest.MonkeyPatch):
    block, x = quantized(Block(), up=INT4, down=NVFP4, mix=INT4), torch.randn(3, 16)
    before = block(x)
    with held(block) as used:
        assert used.keys() == {"up", "down", "mix"}
        monkeypatch.setattr(LatentWeight, "parts", lambda self: pytest.fail("decoded again"))
        assert_same(block(x), before)
        assert all(used[p] is q.weight for p, q in quant_linears(block).items())
        monkeypatch.undo()
    with torch.no_grad():
        for layer in quant_linears(block).values():
            assert isinstance(layer.weight_quantizer, LatentWeight)
            layer.weight_quantizer.latent.zero_()
    assert not torch.equal(block(x), before)
