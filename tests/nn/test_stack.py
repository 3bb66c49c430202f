"""The decoder's list of layers is found by its structure, or the model is refused."""

from __future__ import annotations

import pytest
from torch import nn

from ongrid.errors import StructureError
from ongrid.nn import Stack, find_stack


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))


def blocks(count: int, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList([block(width) for _ in range(count)])


class Tree(nn.Module):
    """Named children, in the order given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def expert_block(experts: int) -> nn.Module:
    return Tree(attention=nn.Linear(8, 8), mlp=Tree(experts=blocks(experts)))


def test_the_list_of_layers_of_a_causal_model():
    model = Tree(
        model=Tree(embed=nn.Embedding(4, 8), layers=blocks(3), norm=nn.LayerNorm(8)),
        lm_head=nn.Linear(8, 4),
    )
    stack = find_stack(model)
    assert stack == Stack("model.layers", 3)
    assert stack.paths == ["model.layers.0", "model.layers.1", "model.layers.2"]
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    assert all(a is b for a, b in zip(stack.layers(model), layers, strict=True))


def test_what_lies_in_a_layer():
    stack = Stack("model.layers", 12)
    assert stack.holds("model.layers.0.mlp.down_proj.weight")
    assert stack.holds("model.layers.11")
    for path in ("model.layers", "model.layers_extra.0", "lm_head", "model.norm", ""):
        assert not stack.holds(path)


def test_experts_are_never_the_layers():
    """They hold most of the parameters, and there are more of them."""
    layers = nn.ModuleList([expert_block(16) for _ in range(2)])
    assert find_stack(Tree(model=Tree(layers=layers))) == Stack("model.layers", 2)


def test_a_model_that_is_its_own_list():
    model = nn.ModuleList([expert_block(16) for _ in range(2)])
    stack = find_stack(model)
    assert stack == Stack("", 2)
    assert stack.paths == ["0", "1"]
    assert all(a is b for a, b in zip(stack.layers(model), model, strict=True))
    assert stack.holds("0.attention.weight")


def test_one_layer_is_a_list_too():
    assert find_stack(Tree(layers=blocks(1))) == Stack("layers", 1)


def test_a_small_list_beside_the_large_one_does_not_count():
    model = Tree(vision=Tree(layers=blocks(4, width=4)), text=Tree(layers=blocks(4, width=16)))
    assert find_stack(model) == Stack("text.layers", 4)


def test_lists_without_parameters_or_entries_do_not_count():
    model = Tree(
        rotary=nn.ModuleList([nn.Identity(), nn.Identity()]),
        mixed=nn.ModuleList([nn.Linear(64, 64), nn.Identity()]),
        none=nn.ModuleList(),
        layers=blocks(2),
    )
    assert find_stack(model) == Stack("layers", 2)


def test_an_encoder_decoder_is_not_guessed():
    model = Tree(encoder=Tree(layers=blocks(4)), decoder=Tree(layers=blocks(6)))
    with pytest.raises(StructureError) as raised:
        find_stack(model)
    assert "Tree has several lists of layers of similar size" in raised.value.what
    assert "decoder.layers (6 entries), encoder.layers (4 entries)" in raised.value.what
    assert "`layers=`" in raised.value.remedy
    assert find_stack(model, "decoder.layers") == Stack("decoder.layers", 6)


def test_twice_the_size_is_enough():
    model = Tree(a=blocks(4), b=blocks(2))
    assert find_stack(model) == Stack("a", 4)
    with pytest.raises(StructureError, match="similar size"):
        find_stack(Tree(a=blocks(5), b=blocks(3)))


@pytest.mark.parametrize(
    "model", [Tree(), nn.Linear(2, 2), Tree(none=nn.ModuleList()), nn.Sequential(nn.Linear(2, 2))]
)
def test_a_model_without_a_list_is_refused(model: nn.Module):
    with pytest.raises(StructureError, match="has no list of decoder layers") as raised:
        find_stack(model)
    assert "`layers=`" in raised.value.remedy


def test_a_path_overrides_the_search():
    layers = nn.ModuleList([expert_block(3) for _ in range(2)])
    model = Tree(model=Tree(layers=layers))
    path = "model.layers.1.mlp.experts"
    assert find_stack(model, path) == Stack(path, 3)


@pytest.mark.parametrize("path", ["layer", "layers.0", "lm_head", "none", ""])
def test_a_path_to_no_list_is_refused_with_the_lists_there_are(path: str):
    model = Tree(layers=blocks(2), none=nn.ModuleList(), lm_head=nn.Linear(8, 8))
    with pytest.raises(StructureError) as raised:
        find_stack(model, path)
    assert raised.value.what == f"no list of layers at {path!r}"
    assert raised.value.remedy == "Lists in this model: layers, none."
    with pytest.raises(StructureError) as raised:
        find_stack(nn.Linear(2, 2), path)
    assert raised.value.remedy == "Lists in this model: none."
