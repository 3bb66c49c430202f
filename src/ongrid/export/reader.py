"""Readers: what another tool quantized, taken over code by code.

A reader knows one format: from the `quantization_config` of a folder it learns what the tensors of
a quantized linear mean, and gives them as a `QTensor`. It moves bits and never rounds: codes are
unpacked, scales and zeros turned into place. What our grids cannot mean exactly is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, final

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from ongrid._config import Table
from ongrid.errors import ConfigError, GridError, OngridError, StoreError, raise_all
from ongrid.grid import LEVELS, Blocks, Grid, Parts, QTensor
from ongrid.grid.grid import smallest_scale
from ongrid.store.artifact import dtype_name
from ongrid.store.shards import ShardFolder

READERS = Table(
    "format that can be adopted",
    {
        "gptq": "ongrid.export.gptq:GptqReader",
        "compressed-tensors": "ongrid.export.compressed_tensors:CompressedTensorsReader",
    },
)
"""By the `quant_method` of a folder's `quantization_config`."""

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class ForeignLinear:
    """A quantized linear of a foreign folder: its place in the model, and its tensors by part.

    `path` is the model's name for it, `stem` the files'; `shape` is `[out in]`, `dtype` the compute
    dtype.
    """

    path: str
    stem: str
    shape: tuple[int, int]
    dtype: torch.dtype
    names: Mapping[str, str]
    shards: ShardFolder

    def read(self, part: str) -> Tensor:
        return self.shards.read(self.names[part])

    def stored_dtype(self, part: str) -> torch.dtype | None:
        """The dtype of a part, None where the files do not have it."""
        name = self.names.get(part)
        return None if name is None else self.shards.infos[name].dtype

    def misfits(
        self,
        expected: Mapping[str, tuple[tuple[int, ...], Collection[torch.dtype]]],
        optional: Collection[str] = (),
    ) -> list[OngridError]:
        """What of the parts is missing, of another shape or dtype, or there without a meaning."""
        problems: list[str] = [
            f"has no {part}" for part in expected if part not in self.names and part not in optional
        ]
        for part, name in sorted(self.names.items()):
            info = self.shards.infos[name]
            if part not in expected:
                problems.append(f"has a {part}, which its configuration gives no meaning")
                continue
            shape, dtypes = expected[part]
            if info.shape != shape or info.dtype not in dtypes:
                wanted = " or ".join(dtype_name(dtype) for dtype in dtypes)
                problems.append(
                    f"{part} is {dtype_name(info.dtype)} {list(info.shape)}, expected "
                    f"{wanted} {list(shape)}"
                )
        remedy = (
            "Weights and config.json belong to different models, or a download broke off: fetch "
            "both again, from one revision."
        )
        return [StoreError(what, where=self.path, remedy=remedy) for what in problems]


class BlockParts(NamedTuple):
    """What the blocks of a matrix have: scales and zeros `[out C]`, and each column's group."""

    scale: Float[Tensor, "out C"]
    zero: UInt8[Tensor, "out C"] | None
    groups: Int32[Tensor, " in"] | None


class AbstractReader(ABC):
    """A format as one folder is configured in it (a frozen dataclass of what decides its bits).

    `parts`: what the tensors of a quantized linear are called behind its path; a module that has
    one of them is quantized. `stale`: files beside the weights that speak of the old format only.
    Law: `read` gives the codes, scales and zeros of the files, and `check` has refused everything
    that a grid of ours would compute otherwise.
    """

    parts: ClassVar[frozenset[str]]
    stale: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @abstractmethod
    def configured(cls, section: Mapping[str, Any]) -> AbstractReader:
        """The reader of a folder with this `quantization_config`.

        Raises `ConfigError` for every key that it does not know or cannot mean exactly.
        """

    @abstractmethod
    def grid(self, linear: ForeignLinear) -> Grid:
        """The grid that a linear lies on, judged by headers alone: all its parts are there, and
        fit.
        """

    @abstractmethod
    def codes(self, linear: ForeignLinear) -> UInt8[Tensor, "out in"]:
        """The codes of a linear that `grid` has accepted."""

    @abstractmethod
    def blocks(self, linear: ForeignLinear) -> BlockParts:
        """Scales, zeros and groups of a linear that `grid` has accepted.

        Raises what its values, but for the codes, cannot mean under the configuration.
        """

    @final
    def check(self, linear: ForeignLinear) -> Grid:
        """The grid of a linear that can be adopted; raises all that speaks against it.

        Reads all of it but the codes, every one of which is a level.
        """
        try:
            grid = self.grid(linear)
            scale, zero, groups = self.blocks(linear)
            problems: list[OngridError] = list(_unfit_scales(grid, scale, zero, linear.dtype))
            if groups is not None:
                problems += _unbalanced(groups, scale.shape[1])
            raise_all(problems)
        except OngridError as error:
            raise error.at(linear.path) from None
        return grid

    @final
    def read(self, linear: ForeignLinear) -> QTensor:
        """A linear that `check` has accepted, as it is stored: nothing is rounded."""
        scale, zero, groups = self.blocks(linear)
        order = None if groups is None or is_contiguous(groups, scale.shape[1]) else groups
        return QTensor(self.grid(linear), Parts(self.codes(linear), scale, zero), order)


def open_reader(section: Any) -> AbstractReader:
    """The reader of a folder with this `quantization_config`; `ConfigError` where there is none."""
    readable = ", ".join(READERS)
    if not isinstance(section, Mapping) or not isinstance(section.get("quant_method"), str):
        raise ConfigError(
            "config.json has no quantization_config with a quant_method",
            remedy=f"Give a folder in one of these formats: {readable}. An old GPTQ folder keeps "
            'it in quantize_config.json: copy it there, and add "quant_method": "gptq". A float '
            "model is quantized by `ongrid quantize`.",
        )
    method = section["quant_method"]
    if method not in READERS:
        raise ConfigError(
            f"quant_method {method!r} cannot be adopted",
            remedy=f"These can: {readable}. Or quantize the float model that it was made from.",
        )
    return READERS[method].configured(section)


def foreign_grid(linear: ForeignLinear, bits: int, group: int, scales: str, *, zeros: bool) -> Grid:
    """The grid of integer codes in groups of columns (-1: whole rows), `scales` as it is stored.

    Unsigned codes u with a zero z mean (u - z) * s, as ours do, whatever the levels are called:
    `int4` calls code 0 the level -8, and v(u) - v(z) is u - z. Without a zero, formats mean
    (u - 2^(bits-1)) * s, which is the level of the code, all of the range included.
    """
    dtype = linear.stored_dtype(scales)
    if dtype not in SCALE_DTYPES:
        # Any dtype that scales are stored in will do: `misfits` says what is wrong with this one.
        dtype = SCALE_DTYPES[0]
    grid = Grid(LEVELS[f"int{bits}"], Blocks(1, group), dtype, "code" if zeros else None)
    grid.blocks.counts(linear.shape)
    return grid


def not_empty(section: Mapping[str, Any], keys: Collection[str]) -> list[OngridError]:
    """Settings that change what tensors mean, where they are set."""
    return [
        ConfigError(
            f"quantization_config sets {key} to {section[key]!r}, which no reader here can mean",
            remedy="Adopt a model without it, or quantize the float model.",
        )
        for key in sorted(keys)
        if section.get(key)
    ]


def unknown_keys(section: Mapping[str, Any], known: Collection[str]) -> list[OngridError]:
    """Settings that are set and that nobody here knows: they may change what tensors mean."""
    return [
        ConfigError(
            f"quantization_config sets {key} to {section[key]!r}, and this key is not known",
            remedy="Remove it, if it says nothing about what codes, scales and zeros mean.",
        )
        for key in sorted(section.keys() - set(known))
        if section[key] is not None
    ]


def is_contiguous(groups: Int32[Tensor, " in"], count: int) -> bool:
    """Whether columns belong to `count` groups one after the other."""
    size = groups.shape[0] // count
    return bool((groups == torch.arange(groups.shape[0], dtype=torch.int32) // size).all())


def _unfit_scales(
    grid: Grid, scale: Tensor, zero: Tensor | None, dtype: torch.dtype
) -> list[GridError]:
    assert isinstance(grid.scale, torch.dtype)
    # Our own grids never store such a scale, so that the first step of training would move it.
    if not bool((torch.isfinite(scale) & (scale >= smallest_scale(grid.scale))).all()):
        what = "has scales that are negative, zero, NaN, infinite, or no normal float32"
        return [GridError(what, remedy="Quantize the float model: our grids have no such scales.")]
    # Every block by itself, at its lowest and its highest code.
    each = replace(grid, blocks=Blocks(1, 1))
    ends = (torch.full(scale.shape, end, dtype=torch.uint8) for end in (0, 2**grid.levels.bits - 1))
    if all(bool(torch.isfinite(each.decode(Parts(q, scale, zero), dtype)).all()) for q in ends):
        return []
    what = f"has scales whose outermost level is not finite in {dtype_name(dtype)}"
    return [GridError(what, remedy='Set "dtype" to "bfloat16" in config.json.')]


def _unbalanced(groups: Int32[Tensor, " in"], count: int) -> list[StoreError]:
    """Why groups of columns do not stand for blocks; some readers sort columns by group first, and
    then cut them into blocks of equal size.
    """
    size = groups.shape[0] // count
    within = bool(((groups >= 0) & (groups < count)).all())
    if within and bool((groups.long().bincount(minlength=count) == size).all()):
        return []
    return [
        StoreError(
            f"its columns are not in {count} groups of {size} each, from 0 to {count - 1}",
            remedy="Readers of this format would disagree on it. Fetch the files again, or "
            "quantize the float model.",
        )
    ]
