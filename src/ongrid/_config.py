"""Settings on disk: frozen dataclasses to plain dictionaries and back, and named tables.

A settings object becomes `{"kind": name, field: value, ...}`; reading is strict, so that a
misspelt field is an error and never a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ongrid.errors import ConfigError


class Table:
    """Names and the objects they stand for, imported when first asked for.

    The law tests iterate over tables, so adding a line to one adds its tests.
    """

    def __init__(self, noun: str, entries: Mapping[str, str]) -> None:
        self.noun = noun
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> Any:
        if name not in self._entries:
            raise ConfigError(
                f"no {self.noun} is called {name!r}", remedy=_did_you_mean(name, self._entries)
            )
        module, attribute = self._entries[name].split(":")
        return getattr(importlib.import_module(module), attribute)

    def name_of(self, cls: type) -> str:
        """The name under which a class stands in this table."""
        target = f"{cls.__module__}:{cls.__qualname__}"
        for name, entry in self._entries.items():
            if entry == target:
                return name
        raise ConfigError(f"{cls.__qualname__} is not in the table of {self.noun}s")


def to_plain(settings: Any, table: Table) -> dict[str, Any]:
    """A frozen dataclass as a tagged dictionary of JSON values."""
    return {"kind": table.name_of(type(settings)), **dataclasses.asdict(settings)}


def from_plain(plain: Mapping[str, Any], table: Table) -> Any:
    """The settings object that `to_plain` wrote; `ConfigError` on unknown or ill-typed fields."""
    if "kind" not in plain:
        raise ConfigError(f"settings of a {table.noun} without 'kind'", where=repr(dict(plain)))
    return build(table[plain["kind"]], {k: v for k, v in plain.items() if k != "kind"})


def parse(text: str, table: Table) -> Any:
    """The settings object that `name` or `name:field=value,field=value` stands for."""
    name, _, settings = text.partition(":")
    values: dict[str, Any] = {}
    for pair in filter(None, settings.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} is not a setting", where=text, remedy="Write name=value.")
        values[key.strip()] = _value(value.strip())
    return build(table[name], values)


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """`cls(**values)` with every field name and type checked."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    types = typing.get_type_hints(cls)
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(
                f"{cls.__name__} has no setting {name!r}", remedy=_did_you_mean(name, fields)
            )
        if not _fits(value, types[name]):
            raise ConfigError(
                f"{cls.__name__}.{name} takes {_show(types[name])}, not {value!r} "
                f"({type(value).__name__})"
            )
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, type(int | str)):
        return any(_fits(value, h) for h in typing.get_args(hint))
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _show(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(v) for v in typing.get_args(hint))
    return getattr(hint, "__name__", str(hint))


def _did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    listed = ", ".join(near or sorted(known))
    return f"Did you mean {listed}?" if near else f"Known: {listed}."
