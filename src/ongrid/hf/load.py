"""Hugging Face models: a hollow one with a source of weights, or a live one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from ongrid.errors import StoreError
from ongrid.store.artifact import CONFIG_FILE
from ongrid.store.memory import clean_heap
from ongrid.store.paging import ShardSource
from ongrid.store.shards import ShardFolder, tensor_hash

TRANSPOSED = (Conv1D,)
"""Linear layers of transformers that keep their weight as [in, out]."""

PLAIN = (FalconLinear,)
"""Subclasses of nn.Linear with a forward of their own that computes the same: x W^T + b."""

_REFUSALS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ImportError),
    StrictDataclassError,
)
"""What transformers raises for the files of a folder that it cannot use."""


@dataclass(frozen=True)
class Hollow:
    """A model without weights, the source of its weights, and the folder that both came from."""

    model: nn.Module
    source: ShardSource
    folder: Path


def load_hollow(name: str | Path) -> Hollow:
    """A causal language model from a folder or a hub id, with parameters on the meta device.

    Buffers are real, since rotary tables are in no file. No weight is read, but for tied ones that
    are stored twice: they must be equal. Raises `StoreError` for a folder without a readable config
    or weights, for a model that is quantized already or no causal language model, for an
    encoder-decoder, and for parameters that the files do not name.
    """
    folder = local_folder(name)
    _refuse_quantized(folder)
    config = decoder_config(folder)
    shards = ShardFolder(folder)
    model = hollow_model(config, shards)
    return Hollow(model, ShardSource(model, shards, file_names(model, shards)), folder)


def hollow_model(config: PreTrainedConfig, shards: ShardFolder) -> nn.Module:
    """The float model of a config, with parameters on the meta device; no weight is read.

    Its dtype is the config's, or else the one that most numbers of the files have.
    """
    dtype = config.dtype or _common_dtype(shards)
    with (
        _random_states_kept(),
        clean_heap(),
        init_empty_weights(include_buffers=False),
        _refused(shards.folder, "no causal language model", "Give a decoder-only language model."),
    ):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # Outside the context, which makes a new parameter of everything it sees.
    return model.eval()


def load_model(name: str | Path) -> nn.Module:
    """A causal language model in evaluation mode, in the dtype that it is stored in."""
    return AutoModelForCausalLM.from_pretrained(local_folder(name), dtype="auto").eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; `StoreError` where it is missing or broken."""
    remedy = "Lay the model's tokenizer.json and tokenizer_config.json into the folder."
    with _refused(folder, "no tokenizer that can be read", remedy):
        return AutoTokenizer.from_pretrained(folder)


def load_config(folder: Path) -> PreTrainedConfig:
    """The config of a model folder; `StoreError` where transformers cannot use it."""
    source_config(folder)
    with _refused(folder, "transformers does not know this model"):
        return AutoConfig.from_pretrained(folder)


def local_folder(name: str | Path) -> Path:
    """The folder of a model: itself, or the snapshot of a hub id."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(name).startswith(".") or str(name).count("/") != 1:
        raise StoreError(
            "no such model folder",
            where=str(name),
            remedy="Give a folder with config.json and safetensors files, or a hub id owner/name.",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken"]
    try:
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StoreError(
            f"neither a folder here nor a model on the hub: {error}",
            where=str(name),
            remedy="Check the name, or download the model and give its folder.",
        ) from None


def source_config(folder: Path) -> dict[str, Any]:
    """The config of a model folder as it is written there, not as a class would write it again."""
    try:
        plain = json.loads((folder / CONFIG_FILE).read_bytes())
    except FileNotFoundError:
        raise StoreError(
            "no config.json", where=str(folder), remedy="Give a Hugging Face model folder."
        ) from None
    except ValueError as error:
        raise StoreError(f"config.json is not JSON: {error}", where=str(folder)) from None
    if not isinstance(plain, dict):
        raise StoreError("config.json holds no object", where=str(folder))
    return plain


def activation_bytes(config: PreTrainedConfig) -> int:
    """Bytes of one token in one layer, roughly: some hidden states and the widest products."""
    text = config.get_text_config()
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    return (8 * hidden + 3 * inner) * _itemsize(config.dtype)


def _itemsize(dtype: Any) -> int:
    return dtype.itemsize if isinstance(dtype, torch.dtype) else torch.float32.itemsize


def decoder_config(folder: Path) -> PreTrainedConfig:
    """The config of a decoder-only model; `StoreError` for any other."""
    config = load_config(folder)
    if config.is_encoder_decoder:
        raise StoreError(
            f"{config.model_type} is an encoder-decoder",
            where=str(folder),
            remedy="Only decoder-only models are walked so far.",
        )
    return config


def _refuse_quantized(folder: Path) -> None:
    quantization = source_config(folder).get("quantization_config")
    if quantization is not None:
        named = isinstance(quantization, dict) and quantization.get("quant_method")
        method = named or "an unknown method"
        raise StoreError(
            f"the model is quantized already ({method})",
            where=str(folder),
            remedy="Give the float model that it was made from, or adopt this one (ongrid adopt).",
        )


def _common_dtype(shards: ShardFolder) -> torch.dtype:
    """The floating dtype that most numbers of the files have."""
    sizes: dict[torch.dtype, int] = {}
    for info in shards.infos.values():
        if info.dtype.is_floating_point:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def spellings(model: Any, name: str) -> tuple[str, str, str]:
    """How files may call what a model calls `name`, or the other way round: base models have no
    prefix.
    """
    prefix = f"{model.base_model_prefix}."
    return name, name.removeprefix(prefix), prefix + name


def file_names(model: Any, shards: ShardFolder, replaced: Collection[str] = ()) -> dict[str, str]:
    """The file's name of every parameter and persistent buffer, base-model prefixes resolved.

    Parameters in `replaced` are not looked for: the files hold something else in their place.
    """
    names: dict[str, str] = {}
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in replaced:
            aliases.setdefault(id(parameter), []).append(name)
    for name in model.state_dict():
        found = next((s for s in spellings(model, name) if s in shards.infos), None)
        if found is not None and name not in replaced:
            names[name] = found
    missing = []
    for spelled in aliases.values():
        known = [name for name in spelled if name in names]
        if known:
            # A tied parameter is in the files under one of its names, or under several.
            _check_equal(list(dict.fromkeys(names[name] for name in known)), shards)
            names |= {name: names[known[0]] for name in spelled if name not in names}
        else:
            missing.append(spelled[0])
    if missing:
        raise StoreError(
            f"{len(missing)} parameters are not in the files under their names: "
            + ", ".join(missing[:5]),
            where=str(shards.folder),
            remedy="The architecture converts its weights when loading. Load it with "
            "AutoModelForCausalLM.from_pretrained and give the live model.",
        )
    return names


def _check_equal(tied: list[str], shards: ShardFolder) -> None:
    """Tensors that one parameter is made of; where they differ transformers does not tie them."""
    if len(tied) > 1 and len({tensor_hash(shards.read(name)) for name in tied}) > 1:
        raise StoreError(
            f"{' and '.join(tied)} are tied by config.json and differ in the files",
            where=str(shards.folder),
            remedy="Set tie_word_embeddings to false in config.json.",
        )


@contextmanager
def _refused(folder: Path, what: str, remedy: str = "") -> Iterator[None]:
    """What transformers raises within the context becomes a `StoreError` of this folder."""
    try:
        yield
    except _REFUSALS as error:
        raise StoreError(f"{what}: {error}", where=str(folder), remedy=remedy) from error


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Building a model draws random numbers; nobody's generator may notice."""
    with torch.random.fork_rng(devices=[]):
        yield
