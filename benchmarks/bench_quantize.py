"""What quantizing costs: time, memory and layer executions on a real model, and memory over depth.

    python benchmarks/bench_quantize.py [--rows 64] [--out benchmarks/results/quantize.json]

Every measurement is a process of its own. Time is also given as a multiple of one plain forward of
the calibration set through the decoder, in the same process, dtype and batches: machines differ,
and this one may be shared. Memory over depth is measured on random models of SmolLM2's width, read
from disk: how a heap is laid out differs from run to run by some megabytes, so each depth is
measured more than once, and a line is fitted through all of them.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "heads": 9, "kv_heads": 3}
CASES = [("int4_g64", "rtn"), ("w8a8_static", "max"), ("int4_g64", "gptq")]
DEPTHS = [8, 32, 64, 128]
RUNS_OF_DEPTH = 2
BARS = {"rtn": 0, "max": 1, "gptq": 2}
MOST_FORWARDS_OF_TIME = 5.0
MOST_SLOPE_PERCENT = 2.0


def main() -> int:
    """Prints two tables and writes the figures as JSON; exits with 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="What quantizing costs.")
    parser.add_argument("--rows", type=int, default=64, help="calibration rows of 512 tokens")
    parser.add_argument("--out", type=Path, help="where to write the figures")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print("RESULT " + json.dumps(_WORKERS[options.worker](**json.loads(sys.stdin.read()))))
        return 0

    from smollm2 import fetch

    results: dict[str, Any] = {"model": [], "depth": []}
    source = str(fetch())
    for recipe, algorithm in CASES:
        case = {"source": source, "recipe": recipe, "algorithm": algorithm, "rows": options.rows}
        results["model"].append(_measured("quantize", case))
    with tempfile.TemporaryDirectory() as scratch:
        for depth in DEPTHS:
            folder = f"{scratch}/depth-{depth}"
            made = _measured("random_model", {"folder": folder, "depth": depth})
            for _ in range(RUNS_OF_DEPTH):
                found = _measured("peak", {"source": folder, "rows": 16, "batch": 2})
                results["depth"].append({"depth": depth, **made, **found})
            shutil.rmtree(folder)
    return _report(results, options.out)


def _measured(worker: str, arguments: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--worker", worker],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{worker} {arguments} failed:\n{done.stderr[-4000:]}")


def peak(source: str, rows: int, batch: int) -> dict[str, Any]:
    """Peak memory of one GPTQ run from disk to an artifact."""
    return _quantized(source, "int4_g64", "gptq", _batches(source, rows, batch))


def quantize(source: str, recipe: str, algorithm: str, rows: int) -> dict[str, Any]:
    """One run from disk to an artifact, then plain forwards of the same batches for comparison."""
    import torch
    from transformers import AutoModelForCausalLM

    batches = _batches(source, rows, 8)
    executed = _count_executions()
    spent = _quantized(source, recipe, algorithm, batches)
    seconds, cpu = spent["seconds"], spent["cpu_seconds"]
    executions = sum(executed.values())
    plain = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    layers = plain.config.num_hidden_layers
    forward, forward_cpu = [], []
    with torch.inference_mode():
        for _ in range(3):
            begun, begun_cpu = time.perf_counter(), time.process_time()
            for batch in batches:
                plain.model(**batch, use_cache=False)
            forward.append(time.perf_counter() - begun)
            forward_cpu.append(time.process_time() - begun_cpu)
    return {
        "algorithm": algorithm,
        "recipe": recipe,
        **spent,
        "executions_per_layer_and_row": executions / layers / rows,
        "forward_seconds": min(forward),
        "forward_cpu_seconds": min(forward_cpu),
        "multiple_of_forward": seconds / min(forward),
        "cpu_multiple_of_forward": cpu / min(forward_cpu),
    }


def _quantized(
    source: str, recipe: str, algorithm: str, batches: list[dict[str, Any]]
) -> dict[str, Any]:
    """What one run from disk to an artifact takes."""
    from transformers.utils import logging

    import ongrid

    logging.disable_progress_bar()
    rss_before = _peak_rss_mb()
    with tempfile.TemporaryDirectory() as out:
        seconds, cpu = time.perf_counter(), time.process_time()
        ongrid.quantize(source, recipe, batches, algorithm=algorithm, out=f"{out}/artifact")
        seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_rss_mb": _peak_rss_mb(),
        "rss_mb_before": rss_before,
    }


def random_model(folder: str, depth: int) -> dict[str, Any]:
    """A Llama of SmolLM2's width with random weights, in a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=SMOLLM2["hidden_size"],
        intermediate_size=SMOLLM2["intermediate_size"],
        num_hidden_layers=depth,
        num_attention_heads=SMOLLM2["heads"],
        num_key_value_heads=SMOLLM2["kv_heads"],
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="50MB")
    layer = model.model.layers[0]
    return {"layer_bytes": sum(p.numel() * p.element_size() for p in layer.parameters())}


_WORKERS = {"quantize": quantize, "peak": peak, "random_model": random_model}


def _batches(source: str, rows: int, size: int) -> list[dict[str, Any]]:
    return [{"input_ids": part} for part in _ids(source, rows).split(size)]


def _ids(source: str, rows: int) -> Any:
    import torch
    from transformers import AutoTokenizer

    from ongrid.hf import text, windows

    if (Path(source) / "tokenizer.json").exists():
        return windows(text.calibration_text(), AutoTokenizer.from_pretrained(source), 512, rows)
    return torch.randint(0, 1024, (rows, 512), generator=torch.Generator().manual_seed(0))


def _count_executions() -> dict[str, int]:
    """Counts rows through layers that really compute; a recorder on the instance does not."""
    from torch import nn
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    executed = {"rows": 0}

    def count(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, LlamaDecoderLayer) and "forward" not in module.__dict__:
            executed["rows"] += len(args[0])

    nn.modules.module.register_module_forward_pre_hook(count)
    return executed


def _peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _report(results: dict[str, Any], out: Path | None) -> int:
    missed = []
    print(
        "algorithm  recipe       seconds  CPU s  peak RSS MB  executions  x forward  x forward, CPU"
    )
    for row in results["model"]:
        print(
            f"{row['algorithm']:<10} {row['recipe']:<12} {row['seconds']:7.1f} "
            f"{row['cpu_seconds']:6.1f} {row['peak_rss_mb']:12.0f} "
            f"{row['executions_per_layer_and_row']:11.2f} {row['multiple_of_forward']:10.2f} "
            f"{row['cpu_multiple_of_forward']:16.2f}"
        )
        if row["executions_per_layer_and_row"] > BARS[row["algorithm"]]:
            missed.append(f"{row['algorithm']}: executions above {BARS[row['algorithm']]}")
    gptq = results["model"][-1]
    if gptq["multiple_of_forward"] > MOST_FORWARDS_OF_TIME:
        missed.append(f"gptq takes more than {MOST_FORWARDS_OF_TIME} forwards")
    print(f"one plain forward of the calibration set: {gptq['forward_seconds']:.1f} s")
    deep = results["depth"]
    for row in deep:
        print(f"random Llama, {row['depth']} layers: peak RSS {row['peak_rss_mb']:.0f} MB")
    slope = statistics.linear_regression(
        [row["depth"] for row in deep], [row["peak_rss_mb"] for row in deep]
    ).slope
    percent = 100 * slope * 2**20 / deep[0]["layer_bytes"]
    results["slope_percent_of_layer"] = percent
    print(f"peak RSS grows by {percent:.2f} % of a layer's bytes per layer")
    if percent > MOST_SLOPE_PERCENT:
        missed.append(f"memory grows by more than {MOST_SLOPE_PERCENT} % of a layer")
    for bar in missed:
        print(f"MISSED: {bar}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    sys.exit(main())
