"""The main jobs on a real model: quantize SmolLM2-135M four ways, tune one, score all, prove two.

Calibrates and tunes on the first 80 % of Python's own documentation topics and scores on the last
20 %. The model was published as a 4-bit file with groups of 32 and is decoded from it, which
flatters an asymmetric 4-bit grid: compare the rows with each other, not with figures of other
models.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from smollm2 import fetch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

import ongrid
from ongrid.cli.app import print_scores
from ongrid.cli.progress import shown
from ongrid.export.verify import verify
from ongrid.hf import calibration_batches, load_model, score_all, text, windows
from ongrid.store.shards import ShardFolder

OUT = Path("out/demo")
RUNS = [("int4_g64", "rtn"), ("int4_g64", "gptq"), ("int3_g64", "rtn"), ("int3_g64", "gptq")]
PROVED = "int4_g64-gptq"
TUNED = "int3_g64-gptq"
TUNING_SECONDS = 60.0


def main() -> int:
    """Prints a table of scores and the proof; exits with 1 if the proof fails."""
    console = Console()
    logging.disable_progress_bar()
    source = fetch()
    batches = calibration_batches(source, text.NAME, seqlen=512, rows=64)
    console.print(f"calibrating on {batches}", highlight=False)
    folders = {"float": source}
    for recipe, algorithm in RUNS:
        name = f"{recipe}-{algorithm}"
        with shown(console, name) as on_progress:
            ongrid.quantize(
                source,
                recipe,
                batches,
                algorithm=algorithm,
                out=OUT / name,
                on_progress=on_progress,
            )
        folders[name] = OUT / name

    tokenizer = AutoTokenizer.from_pretrained(source)
    tune(console, folders[TUNED], OUT / f"{TUNED}-tuned", tokenizer)
    folders[f"{TUNED}-tuned"] = OUT / f"{TUNED}-tuned"

    models = {name: load_model(folder) for name, folder in folders.items()}
    ids = windows(text.scoring_text(), tokenizer, 512, 16)
    scores = score_all(models, ids, against=models["float"])
    sizes = {name: ShardFolder(folder).nbytes for name, folder in folders.items()}
    print_scores(
        {name: (scores[name], sizes[name]) for name in models},
        "SmolLM2-135M, 16 windows of 512 tokens of Python's documentation",
    )

    console.print(f"verifying {folders[PROVED]}", highlight=False)
    proof = verify(folders[PROVED], fresh_module="ongrid.hf.fresh")
    for line in proof.lines():
        console.print(line, highlight=False, markup=False)
    return 0 if proof.ok else 1


def tune(console: Console, artifact: Path, out: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Trains the scales of an artifact for a minute, and writes what became of it with a proof."""
    model, method = ongrid.load(artifact), ongrid.Peqa(lr=1e-4)
    ongrid.attach(model, method)
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, method))
    rows = windows(text.calibration_text(), tokenizer, 256).split(4)
    begun = time.monotonic()
    steps = 0
    for ids in itertools.cycle(rows):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if time.monotonic() - begun > TUNING_SECONDS:
            break
    proof = ongrid.merge(model, out, overwrite=True)
    console.print(
        f"tuned {artifact} in {steps} steps; merged {proof.matrices} matrices, "
        f"{proof.differing} of {proof.elements} numbers differ",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
