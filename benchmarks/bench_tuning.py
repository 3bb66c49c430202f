"""What layer-wise training and tuning make of a real model: one row a method, at 4, 3 and 2 bits.

    python benchmarks/bench_tuning.py                 # ongrid's own settings
    python benchmarks/bench_tuning.py --published     # those of the published codes
    python benchmarks/bench_tuning.py --quick         # 2 bits and little data: some minutes
    python benchmarks/bench_tuning.py --sweep         # end-to-end learning rates around our own
    python benchmarks/bench_tuning.py --memory        # peak memory of Block-AP over rows
    python benchmarks/bench_tuning.py --autoround PYTHON   # AutoRound's own row beside ours

Every row is a process of its own and is saved when it ends, in out/tuning/SETTING/ROW.json; a rerun
does what is missing. Calibration text is a part of Python's own documentation; scores are taken on
another part, or on the text of --text. A tuned row is scored before it is merged, and again from
the merged artifact's files; both scores must be equal to the last bit, or the row fails.

AutoRound needs an environment of its own, whose interpreter --autoround names. It reads the same
rows, and its decoded weights are scored here like every other row.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

OUT = Path("out/tuning")
TUNED_ROWS, TUNED_TOKENS = 4, 256


@dataclass(frozen=True)
class Case:
    """One row: how a model is quantized or, from the artifact of row `start`, tuned."""

    name: str
    bits: int
    algorithm: str | None = None
    batch: int = 4
    start: str | None = None
    method: str | None = None
    steps: int = 0
    recipe: str = "int{bits}_g64"


@dataclass(frozen=True)
class Data:
    """How much calibration and scoring text; scored on the file `text`, or on documentation."""

    rows: int = 64
    tokens: int = 512
    windows: int = 24
    text: str | None = None


def published(bits: int) -> list[Case]:
    """The defaults of each published code; 64 rows make few steps of them."""
    lr = 2e-5 if bits == 2 else 1e-5
    return [
        Case("rtn", bits, "rtn"),
        Case("gptq", bits, "gptq"),
        Case("signround", bits, "signround", batch=8),
        Case("block_ap", bits, "block_ap", batch=2),
        Case("block_ap+e2e_qp", bits, start="block_ap", method=f"peqa:lr={lr}", steps=8),
        Case("rtn+peqa", bits, start="rtn", method="peqa", steps=8),
        Case("rtn+qalora", bits, start="rtn", method="qalora", steps=8),
    ]


def recommended(bits: int) -> list[Case]:
    """What a sweep found for this amount of data: 64 rows, and 200 steps of 1,024 tokens."""
    signround, twice = (f"signround:iters={n},loss=relative,start=mse" for n in (40, 80))
    qalora = "qalora:lr=3e-4"
    start = "mse" if bits == 2 else "gptq"  # at 2 bits GPTQ's own scales are a worse start
    block_ap = f"block_ap:epochs=3,weight_lr=1e-4,quant_lr=1e-4,loss=relative,start={start}"
    return [
        Case("rtn", bits, "rtn"),
        Case("gptq", bits, "gptq"),
        Case("signround", bits, signround),  # AutoRound's 50 iterations take longer than these
        Case("signround_80", bits, twice),
        Case("block_ap", bits, block_ap),
        Case("block_ap+e2e_qp", bits, start="block_ap", method="peqa:lr=1e-4", steps=200),
        Case("signround_80+peqa", bits, start="signround_80", method="peqa:lr=1e-4", steps=200),
        Case("signround_shift", bits, twice, recipe="int{bits}_g64_shift"),
        Case("signround_shift+qalora", bits, start="signround_shift", method=qalora, steps=200),
    ]


def swept(bits: int) -> list[Case]:
    """Learning rates on both sides of the recommended ones, from the same artifacts."""
    rates = {"signround_80+peqa": ("3e-5", "3e-4"), "signround_shift+qalora": ("1e-4", "1e-3")}
    known = {case.name: case for case in recommended(bits)}
    starts = [known["signround_80"], known["signround_shift"]]
    return starts + [
        replace(known[name], name=f"{name}@{lr}", method=f"{name.partition('+')[2]}:lr={lr}")
        for name, rates in rates.items()
        for lr in rates
    ]


def quick(bits: int) -> list[Case]:
    """The recommended rows with few steps."""
    few = {"iters=40": "iters=8", "iters=80": "iters=16", "epochs=3": "epochs=2"}
    cases = recommended(bits)
    for many, less in few.items():
        cases = [
            replace(c, algorithm=c.algorithm and c.algorithm.replace(many, less)) for c in cases
        ]
    return [replace(case, steps=case.steps and 16) for case in cases]


def main() -> int:
    """Prints the table; exits with 1 where a row failed."""
    parser = argparse.ArgumentParser(description="What training on the grid makes of a model.")
    parser.add_argument("--published", action="store_true", help="settings of the published codes")
    parser.add_argument("--quick", action="store_true", help="2 bits, 16 rows of 256 tokens")
    parser.add_argument("--sweep", action="store_true", help="other learning rates, end to end")
    parser.add_argument("--memory", action="store_true", help="peak memory of Block-AP over rows")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument("--text", help="a file whose text is scored")
    parser.add_argument("--autoround", metavar="PYTHON", help="an interpreter that has auto-round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print("RESULT " + json.dumps(_WORKERS[options.worker](**json.loads(sys.stdin.read()))))
        return 0
    if options.memory:
        return memory()

    from smollm2 import fetch

    setting, cases = ("published", published) if options.published else ("recommended", recommended)
    data, bits = Data(text=options.text), options.bits
    if options.sweep:
        cases = swept
    if options.quick:
        setting, cases, data, bits = "quick", quick, Data(16, 256, 8, options.text), [2]
    if options.autoround:
        setting, cases = "autoround", lambda bits: [Case("autoround", bits, options.autoround)]
    source, done = str(fetch()), []
    for case in (case for b in bits for case in cases(b)):
        if options.only is None or case.name in options.only:
            done.append(_row(case, data, source, OUT / setting))
            _show(done[-1], header=len(done) == 1)
    return 1 if any("failed" in row for row in done) else 0


def _row(case: Case, data: Data, source: str, folder: Path) -> dict[str, Any]:
    """The figures of a row: those of an earlier run with equal settings, or new ones."""
    file = folder / f"{case.bits}-{case.name}.json"
    asked = {"case": asdict(case), "data": asdict(data)}
    if file.exists():
        known = json.loads(file.read_text())
        if known["asked"] == asked:
            return known
    folder.mkdir(parents=True, exist_ok=True)
    worker = "autoround" if case.name == "autoround" else "row"
    found = _measured(worker, {"source": source, "folder": str(folder), **asked})
    row = {"asked": asked, **found}
    if "failed" not in row:
        file.write_text(json.dumps(row, indent=2) + "\n")
    return row


def _measured(worker: str, arguments: Any, python: str = sys.executable) -> dict[str, Any]:
    done = subprocess.run(
        [python, __file__, "--worker", worker],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"failed": done.stderr[-2000:]}


# ---- what a worker does --------------------------------------------------------------------------


def row(source: str, folder: str, case: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Quantizes or tunes, and scores what came out."""
    from transformers.utils import logging

    import ongrid
    from ongrid.hf import text

    logging.disable_progress_bar()
    asked, amount = Case(**case), Data(**data)
    out = Path(folder) / f"{asked.bits}-{asked.name}"
    begun, begun_cpu = time.perf_counter(), time.process_time()
    found: dict[str, Any] = {}
    if asked.start is None:
        ids = _windows(source, amount.tokens, text.calibration_text(), amount.rows)
        batches = [{"input_ids": part} for part in ids.split(asked.batch)]
        ongrid.quantize(
            source, asked.recipe.format(bits=asked.bits), batches,
            algorithm=str(asked.algorithm), out=out, overwrite=True,
        )  # fmt: skip
        model = None
    else:
        model, found = _tuned(source, Path(folder) / f"{asked.bits}-{asked.start}", asked)
    found |= {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - begun_cpu,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    ids = _scored(source, amount)
    if model is not None:
        found["unmerged"] = _score(model, source, ids)
        proof = ongrid.merge(model, out, overwrite=True)
        found["proof"] = {"matrices": proof.matrices, "differing": proof.differing}
    found["merged"] = _score(ongrid.load(out), source, ids)
    if found.get("unmerged", found["merged"]) != found["merged"]:
        raise SystemExit(f"the merged model scores otherwise than the trained one: {found}")
    return {**found, "bits_per_weight": _bits_per_weight(out)}


def _tuned(source: str, artifact: Path, case: Case) -> tuple[Any, dict[str, Any]]:
    """A model that was trained end to end for some steps, and what its losses were."""
    import torch

    import ongrid
    from ongrid.hf import text
    from ongrid.nn import quant_linears
    from ongrid.tune.method import parse_method
    from ongrid.tune.qalora import ShiftedWeight

    model = ongrid.load(artifact)
    method = parse_method(str(case.method))
    ongrid.attach(model, method)
    optimizer = torch.optim.AdamW(ongrid.parameter_groups(model, method))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case.steps)
    ids = _windows(source, TUNED_TOKENS, text.calibration_text(), None)
    losses = []
    model.train()
    for step in range(case.steps):
        at = torch.arange(step * TUNED_ROWS, (step + 1) * TUNED_ROWS) % len(ids)
        loss = model(input_ids=ids[at], labels=ids[at], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    model.eval()
    tail = max(1, len(losses) // 10)
    found: dict[str, Any] = {
        "loss_first": sum(losses[:tail]) / tail,
        "loss_last": sum(losses[-tail:]) / tail,
    }
    weights = [linear.weight_quantizer for linear in quant_linears(model).values()]
    shifted = [weight for weight in weights if isinstance(weight, ShiftedWeight)]
    if shifted:
        found["zeros_moved"] = sum(float(weight.moved()) for weight in shifted) / len(shifted)
    return model, found


def _score(model: Any, source: str, ids: Any) -> dict[str, float]:
    from ongrid.hf import load_model, score

    found = score(model, ids, against=load_model(source))
    assert found.kl is not None
    return {"perplexity": found.perplexity, "kl": found.kl}


def _windows(source: str, tokens: int, read: str, rows: int | None) -> Any:
    from transformers import AutoTokenizer

    from ongrid.hf import windows

    return windows(read, AutoTokenizer.from_pretrained(source), tokens, rows)


def _scored(source: str, amount: Data) -> Any:
    from ongrid.hf import text

    read = text.scoring_text() if amount.text is None else Path(amount.text).read_text()
    return _windows(source, amount.tokens, read, amount.windows)


def _bits_per_weight(folder: Path) -> float:
    import ongrid
    from ongrid.grid import Grid

    matrices = ongrid.Artifact.open(folder).manifest.matrices.values()
    bits = sum(Grid.parse(m["grid"]).stored_bits(tuple(m["shape"])) for m in matrices)
    return bits / sum(m["shape"][0] * m["shape"][1] for m in matrices)


def autoround(source: str, folder: str, case: dict[str, Any], data: dict[str, Any]) -> Any:
    """AutoRound's row: 50 iterations, batches of 4, the calibration rows of the other rows."""
    import torch

    from ongrid.hf import load_model, text

    asked, amount = Case(**case), Data(**data)
    with tempfile.TemporaryDirectory() as place:
        ids = _windows(source, amount.tokens, text.calibration_text(), amount.rows)
        torch.save(ids, f"{place}/rows.pt")
        arguments = {"source": source, "bits": asked.bits, "batch": asked.batch, "place": place}
        found = _measured("autoround_alone", arguments, str(asked.algorithm))
        if "failed" in found:
            raise SystemExit(found["failed"])
        model = load_model(f"{place}/model")
        return {**found, "merged": _score(model, source, _scored(source, amount))}


def autoround_alone(source: str, bits: int, batch: int, place: str) -> dict[str, Any]:
    """What runs in AutoRound's environment, without ongrid: leaves decoded weights."""
    import torch
    from auto_round import AutoRound  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.load(f"{place}/rows.pt")
    rows: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    rounder = AutoRound(
        model, AutoTokenizer.from_pretrained(source), scheme="W4A16", bits=bits, group_size=64,
        sym=False, dataset=torch.utils.data.DataLoader(rows, batch_size=batch), iters=50,
        seqlen=ids.shape[1], nsamples=len(ids), batch_size=batch, device_map="cpu",
        enable_torch_compile=False,
    )  # fmt: skip
    rounded, _ = rounder.quantize()
    found = {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - begun_cpu,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "bits_per_weight": bits + (16 + bits) / 64,
    }
    rounded.float().save_pretrained(f"{place}/model")
    return found


def block_ap_peak(rows: int, tokens: int) -> dict[str, Any]:
    """Peak memory of one Block-AP run over a random Llama of 4 layers and SmolLM2's width."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import ongrid

    config = LlamaConfig(
        vocab_size=1024, hidden_size=576, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=9, num_key_value_heads=3, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    ids = torch.randint(0, 1024, (rows, tokens))
    batches = [{"input_ids": part} for part in ids.split(2)]
    with tempfile.TemporaryDirectory() as out:
        algorithm = ongrid.BlockAp(epochs=1)
        ongrid.quantize(model, "int2_g64", batches, algorithm=algorithm, out=f"{out}/artifact")
    return {"peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


_WORKERS = {
    "row": row,
    "autoround": autoround,
    "autoround_alone": autoround_alone,
    "block_ap_peak": block_ap_peak,
}


def memory() -> int:
    """From 64 to 512 rows the peak may grow by a tenth of the activations that are added."""
    few, many, tokens, width = 64, 512, 256, 576
    peaks = [_measured("block_ap_peak", {"rows": r, "tokens": tokens}) for r in (few, many)]
    grown = peaks[1]["peak_rss_mb"] - peaks[0]["peak_rss_mb"]
    added = (many - few) * tokens * width * 2 / 2**20
    for rows, peak in zip((few, many), peaks, strict=True):
        print(f"{rows} rows of {tokens} tokens: peak RSS {peak['peak_rss_mb']:.0f} MB")
    print(
        f"grown by {grown:.1f} MB, {100 * grown / added:.1f} % of {added:.0f} MB of hidden states"
    )
    return 0 if grown <= added / 10 else 1


def _show(row: dict[str, Any], *, header: bool) -> None:
    case = row["asked"]["case"]
    if header:
        print(
            f"{'row':<24}{'bits':>5}{'bpw':>7}{'PPL':>11}{'KL':>9}{'loss':>17}{'moved':>8}"
            f"{'seconds':>9}{'CPU s':>8}{'RSS MB':>8}"
        )
    name = f"{case['name']:<24}{case['bits']:>5}"
    if "failed" in row:
        print(f"{name} FAILED\n{row['failed']}", flush=True)
        return
    losses = f"{row['loss_first']:.3f} > {row['loss_last']:.3f}" if "loss_first" in row else ""
    moved = f"{100 * row['zeros_moved']:.1f} %" if "zeros_moved" in row else ""
    score = row["merged"]
    print(
        f"{name}{row['bits_per_weight']:>7.3f}{score['perplexity']:>11.3f}{score['kl']:>9.4f}"
        f"{losses:>17}{moved:>8}{row['seconds']:>9.0f}{row['cpu_seconds']:>8.0f}"
        f"{row['peak_rss_mb']:>8.0f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
