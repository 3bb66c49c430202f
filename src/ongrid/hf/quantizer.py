"""The quantization method `ongrid` of transformers: `from_pretrained` of an artifact gives the
model.

Registered when `ongrid.hf` is imported; without that import transformers warns that it does not
know the method. The names of all quantizers and their grids stand in `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ongrid.errors import OngridError, StoreError, raise_all
from ongrid.grid import Grid
from ongrid.hf.load import PLAIN, TRANSPOSED
from ongrid.nn import (
    WEIGHT,
    QuantizerSpec,
    find_linears,
    group_by_linear,
    insert_empty,
    quant_linears,
)
from ongrid.store.shards import ShardFile, TensorInfo

METHOD = "ongrid"
_VERSION = 1
_DYNAMIC = " dynamic"
_STAGE, _UNMERGED = "ongrid_stage", "unmerged"
"""What the metadata of a weight file says while its matrices still train."""


def quantization_config(specs: Mapping[str, QuantizerSpec]) -> dict[str, Any]:
    """The section of `config.json` that describes quantizers: grid strings, and who has them."""
    by_grid: dict[str, list[str]] = {}
    for path, spec in specs.items():
        by_grid.setdefault(f"{spec.grid}{_DYNAMIC if spec.dynamic else ''}", []).append(path)
    return {"quant_method": METHOD, "version": _VERSION, "quantizers": by_grid}


@register_quantization_config(METHOD)
class OngridConfig(QuantizationConfigMixin):
    """That section as transformers holds it."""

    def __init__(
        self,
        quantizers: dict[str, list[str]] | None = None,
        version: int = _VERSION,
        quant_method: str = METHOD,
    ) -> None:
        if version != _VERSION:
            raise StoreError(
                f"quantization_config has version {version}, this release reads {_VERSION}",
                remedy="Read it with the release that wrote it.",
            )
        self.quant_method = quant_method  # pyright: ignore[reportAttributeAccessIssue] - an enum there
        self.version = version
        self.quantizers = quantizers or {}

    def specs(self) -> dict[str, QuantizerSpec]:
        return {
            path: QuantizerSpec(Grid.parse(grid.removesuffix(_DYNAMIC)), grid.endswith(_DYNAMIC))
            for grid, paths in self.quantizers.items()
            for path in paths
        }


@register_quantizer(METHOD)
class OngridQuantizer(HfQuantizer):
    """Puts `QuantLinear`s into a model before its weights load; they load as they are stored."""

    requires_calibration = True

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        sites = find_linears(model, TRANSPOSED, PLAIN)
        config: Any = self.quantization_config
        specs = _present(config.specs(), model, sites)
        infos = _infos(model, checkpoint_files or [])
        # Only the files know: an order that found no place would be dropped in silence.
        ordered = {path for path in sites if f"{path}.{WEIGHT}.order" in infos}
        insert_empty(model, specs, sites, ordered)
        self._stored = {
            name: (tuple(tensor.shape), tensor.dtype)
            for path in group_by_linear(specs)
            for name, tensor in model.get_submodule(path).state_dict(prefix=f"{path}.").items()
            if "_quantizer." in name
        }
        _check_files(self._stored, infos)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        # Some models ask the loader to widen parameters by name; narrowing back loses nothing.
        for name, (_, dtype) in self._stored.items():
            parent, _, leaf = name.rpartition(".")
            buffers = model.get_submodule(parent)._buffers
            held = buffers[leaf]
            if held is not None and held.dtype != dtype:
                buffers[leaf] = held.to(dtype)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[None, dict[str, str]]:
        """Marks what a Trainer saves in the middle: it resumes from it, but it is no artifact."""
        weights = [linear.weight_quantizer for linear in quant_linears(model).values()]
        unmerged = any(True for weight in weights for _ in weight.parameters())
        return None, {_STAGE: _UNMERGED} if unmerged else {}

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True  # else Trainer asks for adapters of its own on top

    @property
    def is_compileable(self) -> bool:
        return True


def _present(
    specs: Mapping[str, QuantizerSpec], model: nn.Module, sites: Mapping[str, Any]
) -> dict[str, QuantizerSpec]:
    """Specs by this model's own names: a base model has no prefix and no head."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found = {}
    for path, of_linear in group_by_linear(specs).items():
        name = next((n for n in (path, path.removeprefix(prefix)) if n in sites), None)
        if name is not None:
            found |= {f"{name}.{kind}": spec for kind, spec in of_linear.items()}
    return found


def _infos(model: nn.Module, files: list[str]) -> dict[str, TensorInfo]:
    """The tensors of files by this model's own names: a base model has no prefix."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    infos: dict[str, TensorInfo] = {}
    for shard in map(ShardFile, map(Path, files)):
        if shard.metadata.get(_STAGE) == _UNMERGED:
            # An adapter would be left out with a warning, and masters taken for stored scales.
            raise StoreError(
                "holds a model in the middle of its training, not a merged one",
                where=str(shard.path),
                remedy="Resume the Trainer from it, then `ongrid.merge(model, out)` and load that.",
            )
        infos |= shard.infos
    return {name.removeprefix(prefix): info for name, info in infos.items()} | infos


def _check_files(expected: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    """The loader only warns of missing or unfit tensors; here that is an error."""
    problems: list[OngridError] = []
    for name, needed in expected.items():
        info = infos.get(name)
        found = None if info is None else (info.shape, info.dtype)
        if found != needed:
            problems.append(
                StoreError(
                    f"expected {needed}, found {found or 'no such tensor'}",
                    where=name,
                    remedy="config.json and the weights belong to different runs.",
                )
            )
    raise_all(problems)
