"""The format of GPTQ folders, as AutoGPTQ began it and GPTQModel and transformers read it.

Of a linear X with weights [out in], in C groups of inputs,

    X.qweight   int32 [in*b/32 out]   codes, a little-endian bit stream along the input
    X.qzeros    int32 [C out*b/32]    zeros, a bit stream along the output
    X.scales    float [C out]
    X.g_idx     int32 [in]            the group of each input; absent means one after the other

and a weight is (code - zero) * scale. Version 1 (`checkpoint_format: gptq`) stores zeros less one,
version 2 (`gptq_v2`) as they are. Codes of 3 bits straddle words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from ongrid._config import build
from ongrid.errors import ConfigError, GridError, OngridError, StoreError, raise_all
from ongrid.export.reader import (
    SCALE_DTYPES,
    AbstractReader,
    BlockParts,
    ForeignLinear,
    foreign_grid,
    is_contiguous,
    not_empty,
    unknown_keys,
)
from ongrid.grid import Grid, unpack_words

_VERSIONS = ("gptq", "gptq_v2")
_BITS = (2, 3, 4, 8)
_MEANT = ("bits", "group_size", "desc_act", "sym")
# How the codes were found, how they may be run, and what the files say better themselves.
_NEUTRAL = (
    *("quant_method", "method", "meta", "lm_head", "dataset", "tokenizer", "batch_size"),
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse"),
    *("act_group_aware", "model_seqlen", "max_input_length", "pad_token_id", "backend"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "cache_block_outputs"),
    *("modules_in_block_to_quantize", "model_name_or_path", "model_file_base_name"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config"),
)
# Other bits for single modules, adapters beside the codes, rotated weights, other packings.
_CHANGING = ("dynamic", "adapter", "rotation", "is_marlin_format")


@dataclass(frozen=True)
class GptqReader(AbstractReader):
    """A GPTQ folder: bits, group size (-1: a scale for each output), and how zeros are stored."""

    parts: ClassVar[frozenset[str]] = frozenset(("qweight", "qzeros", "scales", "g_idx"))
    stale: ClassVar[frozenset[str]] = frozenset(("quantize_config.json",))

    bits: int
    group_size: int
    desc_act: bool
    sym: bool
    checkpoint_format: str = "gptq"

    @classmethod
    def configured(cls, section: Mapping[str, Any]) -> GptqReader:
        words = {str(section[key]) for key in ("checkpoint_format", "format") if section.get(key)}
        problems = not_empty(section, _CHANGING)
        known = (*_MEANT, *_NEUTRAL, *_CHANGING, "checkpoint_format", "format", "pack_dtype")
        problems += unknown_keys(section, known)
        if not words <= set(_VERSIONS) or len(words) > 1:
            problems.append(
                ConfigError(
                    f"checkpoint_format {' and '.join(sorted(map(repr, words)))}",
                    remedy=f"Of GPTQ's packings one of these can be read: {', '.join(_VERSIONS)}.",
                )
            )
        if section.get("pack_dtype", "int32") not in ("int32", None):
            remedy = "Codes are read from words of 32 bits: pack them as int32."
            problems.append(ConfigError(f"pack_dtype {section['pack_dtype']!r}", remedy=remedy))
        missing = [key for key in _MEANT if key not in section]
        if missing:
            remedy = "Add them, as the model was quantized: they decide what its codes mean."
            what = f"quantization_config has no {', '.join(missing)}"
            problems.append(ConfigError(what, remedy=remedy))
        raise_all(problems)
        meant = {key: section[key] for key in _MEANT}
        return build(cls, {**meant, "checkpoint_format": next(iter(words), "gptq")})

    def __post_init__(self) -> None:
        problems: list[OngridError] = []
        if self.bits not in _BITS:
            what = f"GPTQ with {self.bits} bits"
            remedy = f"Its packing is known for {', '.join(map(str, _BITS))} bits."
            problems.append(ConfigError(what, remedy=remedy))
        if self.group_size != -1 and self.group_size < 1:
            remedy = "A group has 1 column or more; -1 is all of them."
            problems.append(ConfigError(f"group_size {self.group_size}", remedy=remedy))
        raise_all(problems)

    def grid(self, linear: ForeignLinear) -> Grid:
        grid = foreign_grid(linear, self.bits, self.group_size, "scales", zeros=not self.sym)
        rows, cols = linear.shape
        _, count = grid.blocks.counts(linear.shape)
        if rows * self.bits % 32 or cols * self.bits % 32:
            raise GridError(
                f"{cols} inputs and {rows} outputs of {self.bits} bits do not fill 32-bit words",
                remedy="GPTQ's format has no such matrix: fetch the files again.",
            )
        expected = {
            "qweight": ((cols * self.bits // 32, rows), (torch.int32,)),
            "qzeros": ((count, rows * self.bits // 32), (torch.int32,)),
            "scales": ((count, rows), SCALE_DTYPES),
            "g_idx": ((cols,), (torch.int32,)),
        }
        raise_all(linear.misfits(expected, optional=() if self.desc_act else ("g_idx",)))
        return grid

    def codes(self, linear: ForeignLinear) -> UInt8[Tensor, "out in"]:
        return unpack_words(linear.read("qweight").T, self.bits)

    def blocks(self, linear: ForeignLinear) -> BlockParts:
        scale = linear.read("scales").T.contiguous()
        zero = self._zeros(linear)
        groups = linear.read("g_idx") if "g_idx" in linear.names else None
        middle = 2 ** (self.bits - 1)
        problems: list[OngridError] = []
        if self.sym and not bool((zero == middle).all()):
            # Some kernels read the zeros of a symmetric folder and others take them for granted, so
            # that it would be two models. The bytes alone do not say which one was meant.
            problems.append(
                StoreError(
                    f"is symmetric by its config (sym), but has zeros other than {middle}",
                    remedy=f"If they are all {middle - 1} or {middle + 1}, checkpoint_format is "
                    "wrong: gptq stores zeros less one, gptq_v2 as they are. If they vary, set sym "
                    "to false.",
                )
            )
        if groups is not None and not self.desc_act and not is_contiguous(groups, scale.shape[1]):
            # The same: kernels that go by desc_act do not look at g_idx.
            problems.append(
                StoreError(
                    "has a g_idx that reorders its columns, but desc_act is false",
                    remedy="Set desc_act to true, if the model was quantized so.",
                )
            )
        raise_all(problems)
        return BlockParts(scale, None if self.sym else zero, groups)

    def _zeros(self, linear: ForeignLinear) -> UInt8[Tensor, "out C"]:
        stored = unpack_words(linear.read("qzeros"), self.bits).T.contiguous()
        if self.checkpoint_format == "gptq":
            # Zero 0 is stored as 2^b - 1. Each zero wraps by itself: added to whole words, the one
            # would carry into the neighbour.
            stored = stored.add_(1).bitwise_and_(2**self.bits - 1)
        return stored
