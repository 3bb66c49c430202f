"""Recipes: which quantizer gets which grid, as ordered rules over module paths.

A recipe is a YAML file:

    name: int4_g64
    rules:
      - {match: "*.weight_quantizer", grid: int4.64.code.fp16}
      - {match: "<outside>", grid: null}

A rule matches quantizer paths with `*`, `?` and `[]`. The last rule that matches decides, and
`null` keeps float. `<outside>` stands for everything outside the decoder layers. A pattern that
matches nothing is an error, unless its rule says `optional: true`.

Rules reach linear layers. Where most of a decoder is anything else (fused experts), a recipe is
refused, unless it says `partial: true`: then the rest is quantized.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib.resources
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ongrid._config import build
from ongrid.errors import ConfigError, GridError, OngridError, RecipeError, raise_all
from ongrid.grid import Blocks, Grid
from ongrid.nn import (
    INPUT,
    OUTPUT,
    WEIGHT,
    ActivationQuantizer,
    LinearSite,
    OtherWeight,
    QuantizerSpec,
    Stack,
    group_by_linear,
)

OUTSIDE = "<outside>"
NO_RULE = "no rule matches"
_KEYS = ("name", "rules", "layers", "partial")


@dataclass(frozen=True)
class Rule:
    """One line of a recipe: a pattern of quantizer paths, and a grid or None for float."""

    match: str
    grid: str | None
    dynamic: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return f'"{self.match}": {self.grid or "float"}'


@dataclass(frozen=True)
class Recipe:
    """Named rules; the same for every model until `resolve` applies them to one."""

    name: str
    rules: tuple[Rule, ...]
    layers: str | None = None
    """The path of the decoder's list of layers, where a model's structure does not tell it."""
    partial: bool = False
    """Whether most of the decoder may stay float because no linear layer holds it."""

    @staticmethod
    def load(source: str | Path | Mapping[str, Any] | Recipe) -> Recipe:
        """A recipe from a preset's name, a YAML file, or a dictionary of the same shape.

        Raises `RecipeError` for an unknown preset, an unknown key, or a grid that does not parse.
        """
        if isinstance(source, Recipe):
            return source
        if isinstance(source, Mapping):
            return _from_plain(source, where=str(source.get("name", "recipe")))
        path = Path(source)
        if path.suffix in (".yaml", ".yml") or path.is_file():
            return _from_yaml(path)
        names = presets()
        if str(source) not in names:
            near = difflib.get_close_matches(str(source), names, n=3) or names
            raise RecipeError(
                f"no recipe is called {str(source)!r}",
                remedy=f"Give a YAML file, or a preset: {', '.join(near)}.",
            )
        with importlib.resources.as_file(_preset_folder().joinpath(f"{source}.yaml")) as file:
            return _from_yaml(file)

    def to_plain(self) -> dict[str, Any]:
        """The dictionary that `load` reads back."""
        layers = {} if self.layers is None else {"layers": self.layers}
        partial = {"partial": True} if self.partial else {}
        rules = [asdict(rule) for rule in self.rules]
        return {"name": self.name, "rules": rules, **layers, **partial}

    def resolve(
        self,
        sites: Mapping[str, LinearSite],
        stack: Stack,
        others: Mapping[str, OtherWeight] | None = None,
    ) -> Plan:
        """Applies the rules to a model's linear layers; all problems in one error.

        `others` are the parameters that no rule can reach; those of the decoder are kept and say
        why. Raises `RecipeError` for patterns without a match, for activation quantizers without a
        weight quantizer and, unless the recipe is `partial`, for others that are most of the
        decoder; `GridError` for matrices that do not divide into blocks.
        """
        unreached = {path: w for path, w in (others or {}).items() if stack.holds(path)}
        numbers = {p: math.prod(site.shape) for p, site in sites.items() if stack.holds(p)}
        numbers |= {p: math.prod(w.shape) for p, w in unreached.items()}
        decided: dict[str, int] = {}
        problems: list[OngridError] = []
        paths = [f"{site}.{kind}" for site in sites for kind in (WEIGHT, INPUT, OUTPUT)]
        for index, rule in enumerate(self.rules):
            matched = [p for p in paths if _matches(rule, p, stack)]
            if not matched and not rule.optional and rule.match != OUTSIDE:
                problems.append(_unmatched(index, rule, paths))
            decided.update(dict.fromkeys(matched, index))
        specs = {
            path: QuantizerSpec(Grid.parse(rule.grid), rule.dynamic)
            for path, index in decided.items()
            if (rule := self.rules[index]).grid is not None
        }
        problems += self._misfits(specs, decided, sites)
        if not self.partial:
            problems += _mostly_unreached(unreached, numbers)
        raise_all(problems)
        kept = {
            site: str(self.rules[index]) if index is not None else NO_RULE
            for site in sites
            if f"{site}.{WEIGHT}" not in specs
            for index in [decided.get(f"{site}.{WEIGHT}")]
        }
        kept |= {path: w.why for path, w in unreached.items()}
        chosen = {s: sites[s] for s in group_by_linear(specs)}
        return Plan(self, stack, specs, chosen, kept, decided, sum(numbers.values()))

    def _misfits(
        self,
        specs: Mapping[str, QuantizerSpec],
        decided: Mapping[str, int],
        sites: Mapping[str, LinearSite],
    ) -> list[OngridError]:
        """What is wrong with the resolved specs; alike problems of many modules become one."""
        alike: dict[tuple[int, str, str], list[str]] = {}
        for linear, of_linear in group_by_linear(specs).items():
            for kind, spec in of_linear.items():
                index = decided[f"{linear}.{kind}"]
                try:
                    _check_spec(kind, spec, of_linear, sites[linear])
                except (GridError, RecipeError) as error:
                    alike.setdefault((index, error.what, error.remedy), []).append(
                        f"{linear}.{kind}"
                    )
        return [
            GridError(
                f"{what} (rule {index + 1}, {self.rules[index]})",
                where=", ".join(paths),
                remedy=f'{remedy} Change rule {index + 1}, or add one for these with "grid: null".',
            )
            for (index, what, remedy), paths in alike.items()
        ]


@dataclass(frozen=True)
class Plan:
    """A recipe applied to one model: every quantizer, and what stays float and why.

    `kept` names linears by module path, and other weights of the decoder by parameter path.
    `numbers` counts all of these in the decoder, quantized or not.
    """

    recipe: Recipe
    stack: Stack
    quantizers: Mapping[str, QuantizerSpec]
    sites: Mapping[str, LinearSite]
    kept: Mapping[str, str]
    decided: Mapping[str, int] = field(repr=False)
    numbers: int

    def within(self, path: str) -> tuple[dict[str, QuantizerSpec], dict[str, LinearSite]]:
        """Specs and sites below a module, with paths relative to it."""
        head = f"{path}." if path else ""
        return (
            {p.removeprefix(head): s for p, s in self.quantizers.items() if p.startswith(head)},
            {p.removeprefix(head): s for p, s in self.sites.items() if p.startswith(head)},
        )

    def outside(self) -> dict[str, QuantizerSpec]:
        """Specs of the quantizers outside the decoder layers."""
        return {p: s for p, s in self.quantizers.items() if not self.stack.holds(p)}

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for each quantized number, scales and zeros included."""
        bits = numbers = 0
        for path, site in self.sites.items():
            bits += self.quantizers[f"{path}.{WEIGHT}"].grid.stored_bits(site.shape)
            numbers += site.out_features * site.in_features
        return bits / numbers if numbers else 0.0

    @property
    def share(self) -> float:
        """The part of the decoder's numbers that is quantized, from 0 to 1."""
        inside = (site for path, site in self.sites.items() if self.stack.holds(path))
        return sum(math.prod(site.shape) for site in inside) / max(self.numbers, 1)

    def explain(self) -> str:
        """A table of what each group of modules gets and which rule decided it, and the share."""
        rows = [("modules", "count", "grid", "decided by")]
        alike: dict[tuple[str, str, str], int] = {}
        for path, spec in self.quantizers.items():
            grid = f"{spec.grid}{' dynamic' if spec.dynamic else ''}"
            why = f"rule {self.decided[path] + 1}"
            key = (_without_indices(path), grid, why)
            alike[key] = alike.get(key, 0) + 1
        for path, why in self.kept.items():
            key = (_without_indices(path), "float", why)
            alike[key] = alike.get(key, 0) + 1
        rows += [(path, str(count), grid, why) for (path, grid, why), count in alike.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return (
            "\n".join(
                "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
                for row in rows
            )
            + f"\n{100 * self.share:.1f} % of the decoder's numbers are quantized"
        )


def presets() -> list[str]:
    """The names of the recipes that ship with the library."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in _preset_folder().iterdir()
        if entry.name.endswith(".yaml")
    )


def _preset_folder() -> Any:
    return importlib.resources.files("ongrid").joinpath("recipes")


def _from_yaml(path: Path) -> Recipe:
    import yaml

    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError("no such recipe file", where=str(path)) from None
    except yaml.YAMLError as error:
        raise RecipeError(f"not YAML: {error}", where=str(path)) from None
    return _from_plain(plain, where=str(path))


def _from_plain(plain: Any, where: str) -> Recipe:
    if not isinstance(plain, Mapping) or not isinstance(plain.get("rules"), list | tuple):
        raise RecipeError(
            "a recipe is a mapping with `name` and a list of `rules`",
            where=where,
            remedy='For instance: rules: [{match: "*.weight_quantizer", grid: int4.64.code.fp16}].',
        )
    problems: list[OngridError] = []
    layers, partial = plain.get("layers"), plain.get("partial", False)
    if not isinstance(layers, str | None):
        remedy = "Give the path of a ModuleList, such as model.layers."
        problems.append(RecipeError(f"`layers` is {layers!r}", where=where, remedy=remedy))
    if not isinstance(partial, bool):
        remedy = "Give true or false."
        problems.append(RecipeError(f"`partial` is {partial!r}", where=where, remedy=remedy))
    for key in sorted(plain.keys() - set(_KEYS)):
        near = difflib.get_close_matches(str(key), _KEYS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"A recipe has {', '.join(_KEYS)}."
        problems.append(RecipeError(f"unknown key {key!r}", where=where, remedy=hint))
    rules = []
    for number, entry in enumerate(plain["rules"], 1):
        try:
            rules.append(_rule(entry))
        except (ConfigError, GridError, RecipeError) as error:
            problems.append(
                RecipeError(error.what, where=f"{where}, rule {number}", remedy=error.remedy)
            )
    raise_all(problems)
    return Recipe(str(plain.get("name", Path(where).stem)), tuple(rules), layers, partial)


def _rule(entry: Any) -> Rule:
    if not isinstance(entry, Mapping) or not {"match", "grid"} <= entry.keys():
        raise RecipeError(f"a rule needs `match` and `grid`, not {entry!r}")
    rule = build(Rule, entry)
    if rule.grid is not None:
        Grid.parse(rule.grid)
    return rule


def _matches(rule: Rule, path: str, stack: Stack) -> bool:
    if rule.match == OUTSIDE:
        return not stack.holds(path)
    return fnmatch.fnmatchcase(path, rule.match)


def _unmatched(index: int, rule: Rule, paths: list[str]) -> RecipeError:
    shapes = list(dict.fromkeys(_without_indices(p) for p in paths))
    near = difflib.get_close_matches(rule.match, shapes, n=3, cutoff=0.3)
    return RecipeError(
        f"rule {index + 1} matches nothing: {rule.match!r}",
        remedy=f"Nearest quantizers: {', '.join(near or shapes[:3])}. "
        "Correct the pattern, or mark the rule `optional: true`.",
    )


def _mostly_unreached(
    unreached: Mapping[str, OtherWeight], numbers: Mapping[str, int]
) -> list[RecipeError]:
    """What is wrong where most numbers of the decoder are in no linear layer."""
    total, beyond = sum(numbers.values()), sum(numbers[path] for path in unreached)
    if 2 * beyond <= total:
        return []
    alike = {f"{_without_indices(path)} ({w.why})": None for path, w in unreached.items()}
    return [
        RecipeError(
            f"{100 * beyond / total:.1f} % of the decoder's numbers are in no linear layer and "
            f"would stay float: {', '.join(alike)}",
            remedy="Write `partial: true` into the recipe to quantize only the rest.",
        )
    ]


def _check_spec(
    kind: str, spec: QuantizerSpec, of_linear: Mapping[str, QuantizerSpec], site: LinearSite
) -> None:
    if kind == WEIGHT:
        if spec.dynamic:
            raise RecipeError("a weight quantizer is never dynamic", remedy="Drop `dynamic: true`.")
        counts = spec.grid.blocks.counts(site.shape)
        if isinstance(spec.grid.scale, Grid):
            spec.grid.scale.blocks.counts(counts)
        return
    if WEIGHT not in of_linear:
        raise RecipeError(
            "an activation quantizer on a linear whose weight stays float",
            remedy="Give its weight_quantizer a grid too.",
        )
    ActivationQuantizer(spec.grid, dynamic=spec.dynamic)
    grid = spec.grid
    while isinstance(grid, Grid):
        if grid.blocks.rows > 1:
            raise RecipeError(
                f"activation blocks of {grid.blocks.rows} tokens: a call may have any number",
                remedy="Use blocks within one token: `channel`, or a group size such as 64.",
            )
        grid = grid.scale
    features = site.in_features if kind == INPUT else site.out_features
    if spec.grid.blocks.cols != -1:
        Blocks(1, spec.grid.blocks.cols).counts((1, features))


def _without_indices(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", path)
