"""Recipes: what a rule means for a model, and every way in which one can be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ongrid
import toy
from ongrid.errors import GridError, OngridError, Problems, RecipeError, StoreError
from ongrid.nn import LinearSite, OtherWeight, Stack
from ongrid.recipe import Recipe, presets

DOWN = [f"model.layers.{i}.mlp.down_proj.weight_quantizer" for i in range(3)]


def never() -> Iterator[Any]:
    raise AssertionError("the calibration set was read")
    yield


def rules(*lines: dict[str, Any]) -> dict[str, Any]:
    return {"name": "toy", "rules": list(lines)}


def rule(match: str, grid: str | None, **more: Any) -> dict[str, Any]:
    return {"match": match, "grid": grid, **more}


ALL4 = rule("*.weight_quantizer", "int4.32.code.fp16")
ALL64 = rule("*.weight_quantizer", "int4.64.code.fp16")
OUTSIDE = rule("<outside>", None)


# ---- T05 -------------------------------------------------------------------------------------


def test_a_group_that_does_not_divide_is_found_before_data_is_read():
    model = toy.build(intermediate_size=176)
    with pytest.raises(GridError) as caught:
        ongrid.quantize(model, rules(ALL64, OUTSIDE), never(), algorithm="gptq")
    message = str(caught.value)
    assert all(path in message for path in DOWN)
    assert "176 columns do not divide into blocks of 64" in message
    assert "44, 88" in message  # the nearest groups that do
    assert "rule 1" in message and "*.weight_quantizer" in message
    assert "gate_proj" not in message and "q_proj" not in message


def test_an_override_really_has_its_group(tmp_path: Path):
    folder = toy.save(toy.build(intermediate_size=176), tmp_path / "m")
    recipe = rules(ALL64, OUTSIDE, rule("*.down_proj.weight_quantizer", "int4.16.code.fp16"))
    artifact = ongrid.quantize(folder, recipe, toy.batches(1), algorithm="gptq", out=tmp_path / "q")
    seen = {}
    for path, q in artifact.stream():
        seen[path] = q.parts.scale.shape[1]
        assert q.grid.blocks.cols == (16 if "down_proj" in path else 64)
    assert {groups for path, groups in seen.items() if "down_proj" in path} == {11}
    assert len(seen) == 21


def test_what_is_left_in_float_is_listed_and_bit_identical(tmp_path: Path):
    source = toy.build(intermediate_size=176, dtype=torch.bfloat16)
    folder = toy.save(source, tmp_path / "m")
    recipe = rules(ALL64, OUTSIDE, rule("*.down_proj.weight_quantizer", None))
    plan = ongrid.plan(folder, recipe)
    down = [path.removesuffix(".weight_quantizer") for path in DOWN]
    assert set(plan.kept) == {*down, "lm_head"}
    assert "down_proj" in plan.kept[down[0]] and "<outside>" in plan.kept["lm_head"]
    artifact = ongrid.quantize(folder, recipe, out=tmp_path / "q")
    assert artifact.manifest.kept == dict(plan.kept)
    for path in down:
        stored = artifact.tensors().read(f"{path}.weight")
        assert torch.equal(stored, source.get_submodule(path).weight)


# ---- problems --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rules": [ALL4], "ruls": 1}, "unknown key 'ruls'\n  Did you mean rules?"),
        ({"rules": [ALL4], "bits": 4}, "unknown key 'bits'\n  A recipe has name, rules, layers, "),
        ({**rules(ALL4), "layers": ["model.layers"]}, "toy: `layers` is ['model.layers']"),
        ({**rules(ALL4), "partial": "yes"}, "toy: `partial` is 'yes'"),
        (rules({**ALL4, "dynamc": True}), "toy, rule 1: Rule has no setting 'dynamc'"),
        (rules({**ALL4, "dynamic": "yes"}), "Rule.dynamic takes bool, not 'yes'"),
        (rules({"match": "*"}), "a rule needs `match` and `grid`"),
        (rules("*"), "a rule needs `match` and `grid`"),  # type: ignore[arg-type]
        (rules(rule("*", "int4")), "'int4' is not a grid"),
        (rules(rule("*", "int9.64.code.fp16")), "no levels 'int9'"),
        (rules(rule("*", "int4.0.code.fp16")), "blocks '0'"),
        ({"name": "x"}, "a recipe is a mapping with `name` and a list of `rules`"),
        ({"rules": "all"}, "a recipe is a mapping with `name` and a list of `rules`"),
    ],
)
def test_recipes_that_do_not_parse(wrong: dict[str, Any], message: str):
    with pytest.raises(RecipeError) as caught:
        Recipe.load(wrong)
    assert message in str(caught.value)


def test_all_that_does_not_parse_is_said_at_once():
    wrong = {"nme": "x", **rules(rule("*", "int9.64.code.fp16"), ALL4, rule("*", "nf4"))}
    with pytest.raises(Problems) as caught:
        Recipe.load(wrong)
    assert len(caught.value.problems) == 3
    assert "rule 1" in str(caught.value) and "rule 3" in str(caught.value)


def test_presets_and_files_that_are_not_there(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"(?s)no recipe is called 'int4_g46'.*int4_g64"):
        Recipe.load("int4_g46")
    with pytest.raises(RecipeError, match="no such recipe file"):
        Recipe.load(tmp_path / "mine.yaml")
    (tmp_path / "broken.yaml").write_text("rules: [")
    with pytest.raises(RecipeError, match=r"broken\.yaml: not YAML"):
        Recipe.load(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(RecipeError, match="a recipe is a mapping"):
        Recipe.load(tmp_path / "list.yaml")


def test_a_pattern_that_matches_nothing_names_the_nearest_paths():
    recipe = rules(ALL4, OUTSIDE, rule("model.layers.*.mlp.down_prj.weight_quantizer", None))
    with pytest.raises(RecipeError) as caught:
        ongrid.quantize(toy.build(), recipe, never(), algorithm="gptq")
    message = str(caught.value)
    assert "rule 3 matches nothing: 'model.layers.*.mlp.down_prj.weight_quantizer'" in message
    assert "model.layers.*.mlp.down_proj.weight_quantizer" in message
    assert "optional: true" in message
    recipe["rules"][2]["optional"] = True
    assert len(ongrid.plan(toy.build(), recipe).quantizers) == 21


def test_everything_that_is_wrong_stands_in_one_message(tmp_path: Path):
    """A full output folder, two patterns, a block size and an activation without its weight."""
    (tmp_path / "notes.txt").write_text("mine")
    recipe = rules(
        rule("*.weight_quantizer", "int4.40.code.fp16"),
        OUTSIDE,
        rule("*.q_prj.*", None),
        rule("*.experts.*", None),
        rule("lm_head.input_quantizer", "int8.tensor.sym.fp32"),
    )
    with pytest.raises(Problems) as caught:
        ongrid.quantize(toy.build(), recipe, never(), algorithm="gptq", out=tmp_path)
    message = str(caught.value)
    for part in ("notes.txt", "q_prj", "experts", "blocks of 40", "lm_head.input_quantizer"):
        assert part in message, part
    assert any(isinstance(problem, StoreError) for problem in caught.value.problems)
    assert toy.contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (rule("*.q_proj.weight_quantizer", "int4.64.code.fp16", dynamic=True), "never dynamic"),
        (rule("*.q_proj.input_quantizer", "int8.channel.sym.fp32"), "a scale per token"),
        (rule("*.q_proj.input_quantizer", "int8.48.sym.fp32", dynamic=True), "blocks of 48"),
        (rule("*.q_proj.input_quantizer", "int8.4x16.sym.fp32", dynamic=True), "of 4 tokens"),
        (
            rule("*.q_proj.input_quantizer", "e2m1.16.sym.[e4m3.8x4.sym.fp32]", dynamic=True),
            "of 8 tokens",
        ),
        (rule("lm_head.output_quantizer", "int8.tensor.sym.fp32"), "whose weight stays float"),
        (rule("*.q_proj.weight_quantizer", "e2m1.16.sym.[e4m3.3x1.sym.fp32]"), "blocks of 3"),
    ],
)
def test_quantizers_that_cannot_be(line: dict[str, Any], message: str):
    with pytest.raises(OngridError, match=message) as caught:
        ongrid.quantize(toy.build(), rules(ALL4, OUTSIDE, line), never(), algorithm="gptq")
    assert "rule 3" in str(caught.value) and caught.value.remedy


# ---- meaning ---------------------------------------------------------------------------------


def test_the_last_rule_that_matches_decides():
    recipe = rules(
        rule("*.weight_quantizer", "int4.32.code.fp16"),
        rule("*.layers.1.*.weight_quantizer", None),
        rule("*.down_proj.weight_quantizer", "int8.channel.sym.fp16"),
        rule("*.layers.[02].mlp.down_proj.weight_quantizer", "int3.32.sym.fp16"),
        OUTSIDE,
    )
    plan = ongrid.plan(toy.build(), recipe)
    grids = {path: str(spec.grid) for path, spec in plan.quantizers.items()}
    assert grids["model.layers.0.mlp.down_proj.weight_quantizer"] == "int3.32.sym.fp16"
    assert grids["model.layers.1.mlp.down_proj.weight_quantizer"] == "int8.channel.sym.fp16"
    assert grids["model.layers.2.mlp.up_proj.weight_quantizer"] == "int4.32.code.fp16"
    assert "model.layers.1.mlp.up_proj.weight_quantizer" not in grids
    assert plan.kept["model.layers.1.mlp.up_proj"] == '"*.layers.1.*.weight_quantizer": float'


def test_no_rule_keeps_float_and_says_so():
    plan = ongrid.plan(toy.build(), rules(rule("*.mlp.*.weight_quantizer", "int4.32.sym.fp16")))
    assert len(plan.quantizers) == 9
    assert plan.kept["model.layers.0.self_attn.q_proj"] == "no rule matches"
    assert plan.kept["lm_head"] == "no rule matches"


def test_outside_is_all_that_is_in_no_decoder_layer():
    recipe = rules(ALL4, OUTSIDE, rule("lm_head.weight_quantizer", "int8.channel.sym.fp16"))
    assert "lm_head.weight_quantizer" in ongrid.plan(toy.build(), recipe).quantizers
    assert list(ongrid.plan(toy.build(), recipe).outside()) == ["lm_head.weight_quantizer"]
    # A base model has nothing outside: that rule is no mistake.
    assert len(ongrid.plan(toy.build().model, rules(ALL4, OUTSIDE)).quantizers) == 21


def test_the_path_of_the_layers_may_be_given():
    recipe = {**rules(ALL4), "layers": "model.layers"}
    assert ongrid.plan(toy.build(), recipe).stack.size == 3
    with pytest.raises(OngridError, match=r"no list of layers at 'model\.blocks'"):
        ongrid.plan(toy.build(), {**recipe, "layers": "model.blocks"})


def test_explain():
    recipe = rules(
        ALL4,
        rule("*.up_proj.input_quantizer", "int8.channel.sym.fp32", dynamic=True),
        rule("*.layers.0.mlp.down_proj.weight_quantizer", "int3.32.sym.fp16"),
        rule("*.layers.[12].mlp.down_proj.weight_quantizer", None),
        OUTSIDE,
    )
    table = ongrid.plan(toy.build(), recipe).explain()
    *lines, share = table.splitlines()
    rows = [line.split(None, 3) for line in lines]
    assert rows[0] == ["modules", "count", "grid", "decided by"]
    found = {(path, int(count), grid): why for path, count, grid, why in rows[1:]}
    up, down = "model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"
    assert found[f"{up}.weight_quantizer", 3, "int4.32.code.fp16"] == "rule 1"
    assert found[f"{up}.input_quantizer", 3, "int8.channel.sym.fp32"] == "dynamic  rule 2"
    assert found[f"{down}.weight_quantizer", 1, "int3.32.sym.fp16"] == "rule 3"
    assert found[down, 2, "float"] == '"*.layers.[12].mlp.down_proj.weight_quantizer": float'
    assert found["lm_head", 1, "float"] == '"<outside>": float'
    assert sum(count for _, count, _ in found) == 21 + 3 + 1
    assert not any(line != line.rstrip() for line in table.splitlines())
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96  # q and o, k and v, the mlp
    percent = 100 * (3 * layer - 2 * 64 * 96) / (3 * layer)
    assert share == f"{percent:.1f} % of the decoder's numbers are quantized"


def test_bits_per_weight():
    """4-bit codes, with a 16-bit scale and an 8-bit zero for every 64 of them."""
    plan = ongrid.plan(toy.build(intermediate_size=128), rules(ALL64, OUTSIDE))
    assert plan.bits_per_weight == 4 + 24 / 64


# ---- presets and files -----------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_presets(name: str):
    model = toy.build(hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    recipe = Recipe.load(name)
    assert recipe.name == name
    plan = ongrid.plan(model, recipe)
    weights = [path for path in plan.quantizers if path.endswith("weight_quantizer")]
    assert len(weights) == 7 and set(plan.kept) == {"lm_head"}
    assert Recipe.load(recipe.to_plain()) == recipe
    algorithm = "max" if name in ("w8a8_static", "fp8") else "rtn"
    done = ongrid.quantize(model, name, toy.batches(1), algorithm=algorithm)
    with torch.no_grad():
        assert bool(torch.isfinite(done(**toy.batches(1)[0]).logits).all())


def test_presets_leave_routers_in_float():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=64, num_experts=4, head_dim=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model = Qwen3MoeForCausalLM(config)
    plan = ongrid.plan(model, replace(Recipe.load("int4_g64"), partial=True))
    assert not any(".gate." in path for path in plan.quantizers)


STACK = Stack("layers", 2)
SITES = {f"layers.{i}.q": LinearSite(32, 64, transposed=False) for i in range(2)}


def experts(numbers: int) -> dict[str, OtherWeight]:
    return {
        f"layers.{i}.experts.up": OtherWeight((2, 32, numbers // 64), "fused") for i in range(2)
    }


def test_what_no_rule_reaches_is_kept_and_listed():
    outside = {"embed.weight": OtherWeight((9, 9), "Embedding")}
    plan = Recipe.load(rules(ALL4)).resolve(SITES, STACK, {**experts(1024), **outside})
    assert plan.kept == {"layers.0.experts.up": "fused", "layers.1.experts.up": "fused"}
    assert plan.share == 2048 / (2048 + 1024)
    table = plan.explain().splitlines()
    assert table[-2].split() == ["layers.*.experts.up", "2", "float", "fused"]
    assert table[-1] == "66.7 % of the decoder's numbers are quantized"


def test_a_decoder_that_rules_mostly_do_not_reach_is_refused_unless_partial():
    recipe, others = Recipe.load(rules(ALL4)), experts(4096)
    with pytest.raises(RecipeError) as caught:
        recipe.resolve(SITES, STACK, others)
    assert "66.7 % of the decoder's numbers" in caught.value.what
    assert caught.value.what.endswith("layers.*.experts.up (fused)")
    assert "`partial: true`" in caught.value.remedy
    partial = Recipe.load({**rules(ALL4), "partial": True})
    assert len(partial.resolve(SITES, STACK, others).quantizers) == 2
    assert Recipe.load(partial.to_plain()) == partial and "partial" not in recipe.to_plain()


def test_a_file_is_a_dictionary_is_a_recipe(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nlayers: model.layers\nrules:\n"
        '  - {match: "*.weight_quantizer", grid: int4.32.code.fp16}\n'
        '  - {match: "*.input_quantizer", grid: int8.channel.sym.fp32, dynamic: true}\n'
        '  - {match: "*.router", grid: null, optional: true}\n'
        '  - {match: "<outside>", grid: null}\n'
    )
    recipe = Recipe.load(file)
    assert Recipe.load(str(file)) == recipe == Recipe.load(recipe.to_plain()) == Recipe.load(recipe)
    assert (recipe.name, recipe.layers, len(recipe.rules)) == ("mine", "model.layers", 4)
    assert recipe.rules[1].dynamic and recipe.rules[2].optional and recipe.rules[3].grid is None
    unnamed = tmp_path / "unnamed.yaml"
    unnamed.write_text('rules: [{match: "*", grid: null}]')
    assert Recipe.load(unnamed).name == "unnamed"
