"""The format of compressed-tensors folders (LLM Compressor's): `pack-quantized` weights.

Of a linear X with weights [out in], in C groups of inputs,

    X.weight_packed       int32 [out ceil(in*b/32)]   codes, a little-endian bit stream per output
    X.weight_scale        float [out C]
    X.weight_zero_point   int32 [ceil(out*b/32) C]    zeros, a bit stream along the output
    X.weight_shape        int64 [2]                   out and in
    X.weight_g_idx        int32 [in]                  the group of each input (actorder "group")

Codes and zeros are stored unsigned, 2^(b-1) above the library's own numbers, and a weight is
(code - zero) * scale. Left out: `int-quantized`, which is stored for activations that are quantized
too, by a scale of amax / 127.5 that no grid of ours has; floats; 2-D blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from ongrid.errors import ConfigError, OngridError, StoreError, raise_all
from ongrid.export.reader import (
    SCALE_DTYPES,
    AbstractReader,
    BlockParts,
    ForeignLinear,
    foreign_grid,
    not_empty,
    unknown_keys,
)
from ongrid.grid import Grid, unpack_words

_FORMAT = "pack-quantized"
_BITS = range(2, 9)
_MEANT = ("quant_method", "format", "quantization_status", "config_groups", "ignore")
_NEUTRAL = ("version", "global_compression_ratio")
_CHANGING = ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config")
_OF_GROUP = ("targets", "weights", "format", "input_activations", "output_activations")
_OF_WEIGHTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder")
_NEUTRAL_OF_WEIGHTS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_IN_SOURCE_ORDER = (None, False, "weight", "static")
_BY_GROUP = (True, "group", "dynamic")


@dataclass(frozen=True)
class _Scheme:
    """What one group of the config says of the linears that it targets."""

    targets: tuple[str, ...]
    bits: int
    group_size: int
    symmetric: bool
    ordered: bool


@dataclass(frozen=True)
class CompressedTensorsReader(AbstractReader):
    """A compressed-tensors folder: its schemes, and what they are not for."""

    parts: ClassVar[frozenset[str]] = frozenset(
        f"weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx")
    )

    schemes: tuple[_Scheme, ...]
    ignore: tuple[str, ...]

    @classmethod
    def configured(cls, section: Mapping[str, Any]) -> CompressedTensorsReader:
        sparsity = section.get("sparsity_config")
        if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense":
            section = {**section, "sparsity_config": None}  # says that nothing is left out
        problems = not_empty(section, _CHANGING)
        problems += unknown_keys(section, (*_MEANT, *_NEUTRAL, *_CHANGING))
        if section.get("quantization_status", "compressed") != "compressed":
            remedy = "Save the model compressed: its weights are not stored as codes."
            what = f"quantization_status {section['quantization_status']!r}"
            problems.append(ConfigError(what, remedy=remedy))
        groups, ignore = section.get("config_groups"), section.get("ignore") or []
        schemes: list[_Scheme] = []
        if not isinstance(groups, Mapping) or not groups:
            problems.append(ConfigError("quantization_config has no config_groups"))
        else:
            for name, group in groups.items():
                try:
                    schemes.append(_scheme(group, section.get("format")))
                except OngridError as error:
                    problems.append(error.at(f"config_groups.{name}"))
        if not _are_patterns(ignore):
            problems.append(ConfigError(f"ignore is {ignore!r}, not a list of modules"))
        raise_all(problems)
        return cls(tuple(schemes), tuple(ignore))

    def grid(self, linear: ForeignLinear) -> Grid:
        scheme = self._scheme_of(linear)
        bits, symmetric = scheme.bits, scheme.symmetric
        grid = foreign_grid(linear, bits, scheme.group_size, "weight_scale", zeros=not symmetric)
        rows, cols = linear.shape
        _, count = grid.blocks.counts(linear.shape)
        expected = {
            "weight_packed": ((rows, -(-cols * bits // 32)), (torch.int32,)),
            "weight_scale": ((rows, count), SCALE_DTYPES),
            "weight_shape": ((2,), (torch.int64, torch.int32)),
        }
        if not symmetric:
            zeros = (-(-rows * bits // 32), count)
            expected["weight_zero_point"] = (zeros, (torch.int32,))
        if scheme.ordered:
            expected["weight_g_idx"] = ((cols,), (torch.int32,))
        raise_all(linear.misfits(expected))
        return grid

    def codes(self, linear: ForeignLinear) -> UInt8[Tensor, "out in"]:
        bits, (_, cols) = self._scheme_of(linear).bits, linear.shape
        return unpack_words(linear.read("weight_packed"), bits)[:, :cols].contiguous()

    def blocks(self, linear: ForeignLinear) -> BlockParts:
        scheme = self._scheme_of(linear)
        shape = tuple(linear.read("weight_shape").tolist())
        if shape != linear.shape:
            raise StoreError(
                f"weight_shape is {list(shape)}, but the model's matrix is {list(linear.shape)}",
                remedy="The config and the weights belong to different models.",
            )
        zero = groups = None
        if not scheme.symmetric:
            stored = unpack_words(linear.read("weight_zero_point"), scheme.bits, axis=0)
            zero = stored[: linear.shape[0]].contiguous()
        if scheme.ordered:
            groups = linear.read("weight_g_idx")
        return BlockParts(linear.read("weight_scale"), zero, groups)

    def _scheme_of(self, linear: ForeignLinear) -> _Scheme:
        """The scheme that targets a linear: by its name, else by a pattern, else as a linear."""
        names = (linear.path, linear.stem)
        if any(how(target, names) for target in self.ignore for how in _SPECIFIC):
            raise StoreError(
                "is quantized in the files, but ignored by quantization_config",
                where=linear.path,
                remedy="Take it out of `ignore`, if the model was quantized so.",
            )
        for how in _SPECIFIC:
            found = [s for s in self.schemes if any(how(target, names) for target in s.targets)]
            if len(found) == 1:
                return found[0]
            if found:
                break
        raise StoreError(
            f"is quantized in the files, and {len(self.schemes)} config_groups target it "
            f"{'more than once' if found else 'not at all'}",
            where=linear.path,
            remedy="Correct their `targets`: one scheme says what the codes of a linear mean.",
        )


_SPECIFIC = (
    lambda target, names: target in names,
    lambda target, names: (
        target.startswith("re:") and any(re.match(target[3:], name) for name in names)
    ),
    lambda target, names: target == "Linear",
)
"""How a target or an ignored entry may mean a linear, the most specific first."""


def _scheme(group: Any, of_folder: Any) -> _Scheme:
    """A group of the config; raises everything in it that our grids cannot mean."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ConfigError(
            "is no scheme with `weights`",
            remedy="Write out what it stands for, as compressed-tensors saves it.",
        )
    weights = group["weights"]
    problems = not_empty(group, ("input_activations", "output_activations"))
    problems += unknown_keys(group, _OF_GROUP)
    problems += unknown_keys(weights, (*_OF_WEIGHTS, *_NEUTRAL_OF_WEIGHTS))
    stored = group.get("format") or of_folder
    if stored != _FORMAT:
        remedy = f"Of compressed-tensors' formats {_FORMAT} can be adopted."
        problems.append(ConfigError(f"format {stored!r}", remedy=remedy))
    if not _are_patterns(group.get("targets")):
        problems.append(ConfigError(f"targets are {group.get('targets')!r}, not modules"))
    problems += _unfit_weights(weights)
    raise_all(problems)
    return _Scheme(
        tuple(group["targets"]),
        weights["num_bits"],
        weights["group_size"] if _is_grouped(weights) else -1,
        weights["symmetric"],
        weights.get("actorder") in _BY_GROUP,
    )


def _unfit_weights(weights: Mapping[str, Any]) -> list[OngridError]:
    size, strategy = weights.get("group_size"), weights.get("strategy")
    judged = {
        "num_bits": type(weights.get("num_bits")) is int and weights["num_bits"] in _BITS,
        "type": weights.get("type") == "int",
        "symmetric": isinstance(weights.get("symmetric"), bool),
        "strategy": strategy in ("group", "channel")
        or (strategy is None and (_is_grouped(weights) or size == -1)),
        "group_size": _is_grouped(weights) or (size in (None, -1) and strategy != "group"),
        "dynamic": weights.get("dynamic") in (None, False),
        "actorder": weights.get("actorder") in (*_IN_SOURCE_ORDER, *_BY_GROUP),
    }
    return [
        ConfigError(
            f"weights with {key} {weights.get(key)!r}",
            remedy=f"Adopted are integers of {_BITS[0]} to {_BITS[-1]} bits, symmetric or not, "
            "with a scale per group or channel, packed once and for all.",
        )
        for key, fits in judged.items()
        if not fits
    ]


def _is_grouped(weights: Mapping[str, Any]) -> bool:
    size = weights.get("group_size")
    return type(size) is int and size > 0 and weights.get("strategy") in (None, "group")


def _are_patterns(found: Any) -> bool:
    """Whether this is a list of module names, classes and patterns that compile."""
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        return False
    try:
        for entry in found:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
    except re.error:
        return False
    return True
