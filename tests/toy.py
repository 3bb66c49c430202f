"""Tiny random models, built from a config in milliseconds: live, or saved as Hugging Face folders.

Nothing is downloaded and no global generator is touched. Every parameter is random, biases and
norms included, so that a tensor that is lost or swapped shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

VOCAB = 96
_SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "vocab_size": VOCAB,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
_GATED = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "num_hidden_layers": 3}

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {}),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, {"sliding_window": 8}),
    "phi3": (tf.Phi3ForCausalLM, tf.Phi3Config, {}),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {"head_dim": 16}),
    "qwen2": (
        tf.Qwen2ForCausalLM,
        tf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "gemma3": (
        tf.Gemma3ForCausalLM,
        tf.Gemma3TextConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    "neox": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, {}),
    "falcon": (
        tf.FalconForCausalLM,
        tf.FalconConfig,
        {"alibi": True, "ffn_hidden_size": 96, "new_decoder_architecture": False},
    ),
    "opt": (
        tf.OPTForCausalLM,
        tf.OPTConfig,
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    ),
    "gpt2": (
        tf.GPT2LMHeadModel,
        tf.GPT2Config,
        {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64},
    ),
}
_OWN_SIZES = {"gpt2": {k: v for k, v in _SIZES.items() if k.endswith(("_id", "vocab_size"))}}


def build(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any
) -> Any:
    """A random model in eval mode; `settings` go into its config."""
    cls, config_cls, own = FAMILIES[family]
    attention = settings.pop("attention", "sdpa")
    config = config_cls(**{**_OWN_SIZES.get(family, _GATED), **own, **settings})
    config._attn_implementation = attention
    config._name_or_path = ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Not `model.to(dtype)`, which would round the rotary tables as no loader does.
        model = cls._from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def ids(rows: int, tokens: int, *, seed: int = 0) -> Tensor:
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, tokens), generator=generator)


def batches(count: int = 2, rows: int = 2, tokens: int = 12) -> list[dict[str, Tensor]]:
    """Batches without padding."""
    return [{"input_ids": ids(rows, tokens, seed=seed)} for seed in range(count)]


def padded(lengths: list[int], *, side: str, seed: int = 0) -> dict[str, Tensor]:
    """One batch of rows of these lengths, filled up with the pad id 2 on one side."""
    width = max(lengths)
    found = ids(len(lengths), width, seed=seed)
    mask = torch.zeros_like(found)
    for row, length in enumerate(lengths):
        real = slice(0, length) if side == "right" else slice(width - length, width)
        mask[row, real] = 1
    return {"input_ids": torch.where(mask.bool(), found, 2), "attention_mask": mask}


def save(model: Any, folder: Path, *, shards: int = 1) -> Path:
    """Writes config and weights as transformers would; tied weights once, `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    first = dict(model.named_parameters())
    first |= {n: t for n, t in model.state_dict().items() if n in dict(model.named_buffers())}
    write_tensors({n: t.detach() for n, t in first.items()}, folder, shards=shards)
    return folder


def write_tensors(tensors: dict[str, Tensor], folder: Path, *, shards: int = 1) -> None:
    """Weight files of a folder, with an index where there are several."""
    tensors = {n: t.clone().contiguous() for n, t in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({**index, "weight_map": weight_map})
    )


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of one token a word, `w3` to `w95`, with a chat template."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, byte for byte."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def recipe(
    grid: str = "int4.32.code.fp16", *rules: tuple[str, str | None], **settings: Any
) -> dict[str, Any]:
    """All linears of the decoder on one grid, and further rules after it."""
    lines = [("*.weight_quantizer", grid), ("<outside>", None), *rules]
    return {"name": "toy", "rules": [{"match": m, "grid": g} for m, g in lines], **settings}


def outputs_of(
    model: nn.Module, layers: list[nn.Module], batch: dict[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Input and output hidden state of every layer in one plain forward, by hooks."""
    seen: list[tuple[Tensor, Tensor]] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.append((hidden.clone(), (out[0] if isinstance(out, tuple) else out).clone()))

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def fed(model: nn.Module, path: str, drive: Callable[[], object]) -> list[Tensor]:
    """Everything that one module is fed while `drive` runs the model."""
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_pre_hook(
        lambda module, args: seen.append(args[0].clone())
    )
    with torch.no_grad():
        drive()
    handle.remove()
    return seen
