"""The command line on a toy model, from quantize to verify."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ongrid.cli.app import app, main
from ongrid.errors import StoreError
from toy import add_tokenizer, build, save

RECIPE = """
name: toy
rules:
  - {match: "*.weight_quantizer", grid: int4.32.code.fp16}
  - {match: "<outside>", grid: null}
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A model with a tokenizer, a recipe and a text."""
    save(build("llama", dtype=torch.bfloat16), tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    (tmp_path / "toy.yaml").write_text(RECIPE)
    words = torch.randint(3, 96, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in words))
    return tmp_path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def quantize(workplace: Path, *more: object) -> str:
    return run(
        *("quantize", workplace / "model", "--recipe", workplace / "toy.yaml"),
        *("--data", workplace / "text.txt", "--seqlen", 32, "--rows", 8),
        *("-o", workplace / "q", *more),
    )


def test_from_quantize_to_verify(workplace: Path) -> None:
    printed = quantize(workplace, "--algorithm", "gptq:damp=0.02")
    assert "4/4, left 0:00" in printed  # three layers and the rest
    inspected = run("inspect", workplace / "q")
    assert "damp=0.02" in inspected
    assert "21 on int4.32.code.fp16" in inspected
    scored = run(
        *("score", workplace / "q", "--against", workplace / "model"),
        *("--data", workplace / "text.txt", "--seqlen", 32, "--rows", 4),
    )
    for word in ("original", "perplexity", "KL per token", "top-1"):
        assert word in scored
    assert "21" in run("verify", workplace / "q")


def test_plan_reads_no_weight(workplace: Path) -> None:
    model = build("llama", dtype=torch.bfloat16)
    model.model.layers[0].mlp.up_proj.weight.data.fill_(torch.nan)  # Reading this would raise.
    save(model, workplace / "model")
    printed = run("plan", workplace / "model", "--recipe", workplace / "toy.yaml")
    assert "model.layers.*.mlp.down_proj.weight_quantizer" in printed
    assert "bits per quantized weight" in printed


def test_verify_fails_on_a_flipped_bit(workplace: Path) -> None:
    quantize(workplace, "--algorithm", "rtn")
    file = workplace / "q/model-layer-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = CliRunner().invoke(app, ["verify", str(workplace / "q")], catch_exceptions=True)
    assert result.exit_code == 1


def test_an_error_is_a_message_and_exit_code_1(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ongrid", "quantize", str(workplace / "model"), "-r", "int4_g46", "-o", "nowhere"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 1
    message = capsys.readouterr().err
    assert "int4_g64" in message
    assert "Traceback" not in message


def test_an_error_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = StoreError(f"expected [rows tokens], not [/x] {'long ' * 40}", where="/a/[b]/c")

    def fail() -> None:
        raise error

    monkeypatch.setattr("ongrid.cli.app.app", fail)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == f"StoreError: {error}\n"


def test_folders_with_brackets_are_printed(workplace: Path) -> None:
    (workplace / "[bold]").mkdir()
    printed = run(
        *("quantize", workplace / "model", "-r", workplace / "toy.yaml", "-a", "rtn"),
        *("-o", workplace / "[bold]" / "[q]"),
    )
    assert f"wrote {workplace}/[bold]/[q]" in printed


def test_accept_is_handed_on(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("ongrid.cli.app.run_quantize", lambda *a, **settings: seen.update(settings))
    quantize(workplace, "--accept", "torch", "--accept", "threads")
    assert list(seen["accept"]) == ["torch", "threads"]
    quantize(workplace)
    assert list(seen["accept"]) == []


def score(workplace: Path, folder: Path) -> str:
    return run(
        *("score", folder, "--against", workplace / "model"),
        *("--data", workplace / "text.txt", "--seqlen", 32, "--rows", 4),
    )


def test_score_of_a_folder_named_original(workplace: Path) -> None:
    quantize(workplace, "--algorithm", "rtn")
    (workplace / "q").rename(workplace / "original")
    printed = score(workplace, workplace / "original")
    assert printed.count("original") == 2 and "(quantized)" in printed


def test_score_of_an_unfinished_artifact_and_without_a_tokenizer(workplace: Path) -> None:
    quantize(workplace, "--algorithm", "rtn")
    (workplace / "model/tokenizer.json").unlink()
    with pytest.raises(StoreError, match=r"model: no tokenizer that can be read"):
        score(workplace, workplace / "q")
    (workplace / "q/config.json").unlink()
    with pytest.raises(StoreError, match="not complete"):
        score(workplace, workplace / "q")


def test_a_second_run_finds_the_work_done(workplace: Path) -> None:
    quantize(workplace)
    before = {p.name: p.stat().st_mtime_ns for p in (workplace / "q").iterdir()}
    printed = quantize(workplace)
    assert before == {p.name: p.stat().st_mtime_ns for p in (workplace / "q").iterdir()}
    assert "left" not in printed


def test_module_runs_as_a_program(workplace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ongrid", "plan", str(workplace / "model"), "-r", "fp8_weight"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "e4m3.channel.sym.fp32" in done.stdout
    assert json.loads((workplace / "model/config.json").read_text())
