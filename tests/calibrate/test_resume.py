"""Killed anywhere and run again: the files of a run that nothing stopped, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ongrid
import toy
from ongrid.errors import Problems, ResumeError
from ongrid.quantize import Progress

SRC = Path(ongrid.__file__).parents[1]
LAYERS = 4
HEAD = ("lm_head.weight_quantizer", "int8.channel.sym.fp16")
RECIPE = toy.recipe("int4.32.code.fp16", HEAD)
LAYER_2, INPUTS_3 = "model-layer-00002.safetensors", "inputs-00003.safetensors"


def data() -> list[dict[str, torch.Tensor]]:
    return [*toy.batches(2), toy.padded([5, 12], side="left", seed=9)]


def source(folder: Path) -> Path:
    model = toy.build(num_hidden_layers=LAYERS, tie_word_embeddings=False)
    toy.save(model, folder, shards=2)
    toy.add_tokenizer(folder)
    return folder


def run(folder: Path, out: Path, **settings: Any) -> list[Progress]:
    """Quantizes, and returns all that was reported."""
    seen: list[Progress] = []
    settings = {"recipe": RECIPE, "batches": data(), "algorithm": "gptq", **settings}
    stop: Callable[[Progress], None] = settings.pop("stop", lambda progress: None)

    def report(progress: Progress) -> None:
        seen.append(progress)
        stop(progress)

    artifact = ongrid.quantize(folder, **settings, out=out, on_progress=report)
    assert isinstance(artifact, ongrid.Artifact) and artifact.complete
    return seen


def segments(seen: list[Progress]) -> list[int]:
    """Which segments were worked on; any report counts."""
    return sorted({progress.segment for progress in seen})


class Stop(Exception):
    """What stands for a kill where the process must live on."""


def stopped(
    folder: Path, out: Path, *, segment: int = 2, phase: str = "forward", **settings: Any
) -> Path:
    def stop(progress: Progress) -> None:
        if (progress.segment, progress.phase) == (segment, phase):
            raise Stop

    with pytest.raises(Stop):
        run(folder, out, stop=stop, **settings)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "q"
    assert segments(run(folder, out)) == list(range(LAYERS + 1))
    found = toy.contents(out)
    assert {"config.json", "ongrid.json", "tokenizer.json", LAYER_2} <= set(found)
    assert len([name for name in found if name.endswith(".safetensors")]) == LAYERS + 1
    return found


@pytest.fixture
def half(folder: Path, tmp_path: Path) -> Path:
    """An artifact whose third layer was begun."""
    out = stopped(folder, tmp_path / "half")
    assert not (out / "config.json").exists() and not (out / LAYER_2).exists()
    return out


# ---- killed ----------------------------------------------------------------------------------

CHILD = """
    import os, signal, sys
    import test_resume
    from pathlib import Path

    kind, which, nth = sys.argv[3], sys.argv[4], int(sys.argv[5])
    count = 0

    def die(name):
        global count
        count += name == which
        if name == which and count == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    replace = os.replace
    def replacing(old, new):
        if kind == "replace":
            die(Path(new).name)
        replace(old, new)
    os.replace = replacing

    def stop(progress):
        if kind == "progress":
            die(f"{progress.segment} {progress.phase}")

    settings = {"algorithm": sys.argv[6]} if len(sys.argv) > 6 else {}
    test_resume.run(Path(sys.argv[1]), Path(sys.argv[2]), stop=stop, **settings)
"""


def python(program: str, *arguments: object) -> int:
    """Runs a program in a process of its own, with as many threads as here; its exit status."""
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (SRC, here, here.parent)))
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    done = subprocess.run(
        [sys.executable, "-c", threads + textwrap.dedent(program), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


KILLS = {
    # kind, where, at which time, and the segment that the next run begins with (None: none)
    "in the middle of a layer": ("progress", "2 forward", 4, 2),
    "between two layers": ("progress", "1 done", 1, 2),
    "inputs half written": ("replace", INPUTS_3, 1, 2),
    "inputs written, layer half written": ("replace", LAYER_2, 1, 2),
    "rest half written": ("replace", "model-rest.safetensors", 1, 4),
    "index half written": ("replace", "model.safetensors.index.json", 1, None),
    "manifest not yet complete": ("replace", "ongrid.json", 2, None),
    "config half written": ("replace", "config.json", 1, None),
}


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("point", KILLS)
def test_killed_and_resumed(point: str, folder: Path, whole: dict[str, bytes], tmp_path: Path):
    kind, which, nth, begins = KILLS[point]
    out = tmp_path / "q"
    assert python(CHILD, folder, out, kind, which, nth) == -signal.SIGKILL
    assert not (out / "config.json").exists()
    with pytest.raises(ongrid.StoreError, match="not complete"):
        ongrid.Artifact.open(out)
    seen = run(folder, out)
    assert segments(seen) == ([] if begins is None else list(range(begins, LAYERS + 1)))
    assert toy.contents(out) == whole


@pytest.mark.alone
@pytest.mark.slow
def test_another_process_gives_equal_bytes(folder: Path, whole: dict[str, bytes], tmp_path: Path):
    assert python(CHILD, folder, tmp_path / "q", "progress", "never", 1) == 0
    assert toy.contents(tmp_path / "q") == whole


# Both chains are kept, and training begins anew with the first layer that is not done.
TRAINING = ["block_ap:weight_lr=1e-3,quant_lr=1e-4,start=gptq", "signround:iters=7"]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", TRAINING)
def test_killed_while_it_trained(algorithm: str, folder: Path, tmp_path: Path):
    run(folder, tmp_path / "whole", algorithm=algorithm)
    random = torch.Generator().manual_seed(len(algorithm))
    block = int(torch.randint(1, LAYERS, (), generator=random))
    step = int(torch.randint(1, 9, (), generator=random))
    out, point = tmp_path / "q", ("progress", f"{block} train", step)
    assert python(CHILD, folder, out, *point, algorithm) == -signal.SIGKILL
    seen = run(folder, out, algorithm=algorithm)
    assert segments(seen) == list(range(block, LAYERS + 1))
    assert toy.contents(out) == toy.contents(tmp_path / "whole")


@pytest.mark.parametrize("block", range(LAYERS + 1))
@pytest.mark.parametrize("algorithm", TRAINING)
def test_stopped_while_it_trained(algorithm: str, block: int, folder: Path, tmp_path: Path):
    run(folder, tmp_path / "whole", algorithm=algorithm)
    phase = "outside" if block == LAYERS else "train"
    out = stopped(folder, tmp_path / "q", segment=block, phase=phase, algorithm=algorithm)
    seen = run(folder, out, algorithm=algorithm)
    assert segments(seen) == list(range(block, LAYERS + 1))
    assert toy.contents(out) == toy.contents(tmp_path / "whole")


# ---- resumed ---------------------------------------------------------------------------------


def test_what_is_done_is_not_done_again(folder: Path, whole: dict[str, bytes], half: Path):
    """The third layer runs for its statistics and to go on, and so on; the first two never."""
    stats = {path: path.stat().st_mtime_ns for path in half.glob("*.safetensors")}
    assert len(stats) == 2
    seen = run(folder, half)
    assert segments(seen) == [2, 3, 4]
    # Three batches: two passes for each of two layers, and one through the head.
    assert len([p for p in seen if p.phase == "forward"]) == 3 * (2 + 2 + 1)
    assert {path: path.stat().st_mtime_ns for path in stats} == stats
    assert toy.contents(half) == whole


def test_stopped_again_and_again(folder: Path, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "q"
    for segment in range(LAYERS + 1):
        stopped(folder, out, segment=segment, phase="outside" if segment == LAYERS else "forward")
    assert segments(run(folder, out)) == [LAYERS]
    assert toy.contents(out) == whole


@pytest.mark.parametrize("algorithm", ["rtn", "mse"])
def test_without_data_nothing_is_kept(algorithm: str, folder: Path, tmp_path: Path):
    settings = {"algorithm": algorithm, "batches": None}
    run(folder, tmp_path / "whole", **settings)

    stopped(folder, tmp_path / "q", phase="calibrate", **settings)
    assert not (tmp_path / "q" / ".resume").exists()
    assert segments(run(folder, tmp_path / "q", **settings)) == [2, 3, 4]
    assert toy.contents(tmp_path / "q") == toy.contents(tmp_path / "whole")


def test_a_complete_artifact_costs_nothing(folder: Path, whole: dict[str, bytes], tmp_path: Path):
    out = tmp_path / "q"
    for name, content in whole.items():
        (out / name).parent.mkdir(exist_ok=True, parents=True)
        (out / name).write_bytes(content)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run(folder, out) == []
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    assert ongrid.Artifact.open(out).damage() == []


# ---- damage ----------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


DAMAGES = {
    "shard flipped": (flip, "model-layer-00001.safetensors", 0),
    "shard truncated": (truncate, "model-layer-00001.safetensors", 0),
    "shard emptied": (lambda path: path.write_bytes(b""), "model-layer-00001.safetensors", 0),
    "shard gone": (Path.unlink, "model-layer-00001.safetensors", 0),
    "inputs flipped": (flip, ".resume/inputs-00002.safetensors", 0),
    "inputs gone": (Path.unlink, ".resume/inputs-00002.safetensors", 0),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_found_and_made_good(
    case: str, folder: Path, whole: dict[str, bytes], half: Path
):
    harm, name, begins = DAMAGES[case]
    harm(half / name)
    assert segments(run(folder, half))[0] == begins
    assert toy.contents(half) == whole


def test_a_shard_of_another_run_is_not_taken(
    folder: Path, whole: dict[str, bytes], half: Path, tmp_path: Path
):
    """It is whole and has the right name, and its content has the hash that it names."""
    other = stopped(folder, tmp_path / "other", algorithm="gptq:damp=0.05")
    for name in ("model-layer-00001.safetensors", ".resume/inputs-00002.safetensors"):
        assert (other / name).read_bytes() != (half / name).read_bytes()
        shutil.copy(other / name, half / name)
    assert segments(run(folder, half))[0] == 0
    assert toy.contents(half) == whole


def test_damage_of_a_complete_artifact_is_named(folder: Path, tmp_path: Path):
    run(folder, tmp_path / "q")
    flip(tmp_path / "q" / LAYER_2)
    truncate(tmp_path / "q" / "model-rest.safetensors")
    damage = ongrid.Artifact.open(tmp_path / "q").damage()
    assert [Path(problem.where).name for problem in damage] == [
        LAYER_2, "model-rest.safetensors"
    ]  # fmt: skip


# ---- refusals --------------------------------------------------------------------------------


def other_token() -> list[dict[str, torch.Tensor]]:
    batches = data()
    batches[1]["input_ids"][0, 0] += 1
    return batches


def other_weight(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    shard = copy / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    return copy


CHANGES = {
    "token": ({"batches": other_token()}, ["data.sha256 "]),
    "batches": ({"batches": data()[:2]}, ["data.batches 3, now 2", "data.rows 6, now 4"]),
    "group": (
        {"recipe": toy.recipe("int4.16.code.fp16", HEAD)},
        ['recipe.rules[0].grid "int4.32.code.fp16", now "int4.16.code.fp16"'],
    ),
    "setting": ({"algorithm": "gptq:damp=0.05"}, ["algorithm.damp 0.01, now 0.05"]),
    "algorithm": (
        {"algorithm": "mse", "batches": None}, ['algorithm.kind "gptq", now "mse"', "data "]
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_other_conditions_are_refused_and_named(change: str, folder: Path, half: Path):
    settings, expected = CHANGES[change]
    before = toy.contents(half)
    with pytest.raises((ResumeError, Problems)) as caught:
        run(folder, half, **settings)
    message = str(caught.value)
    assert all(f"was begun with {part}" in message for part in expected), message
    # Another recipe would make an artifact of two models: there is no way to accept it.
    assert ("accept=" in message) == (change != "group") and str(half) in message
    assert toy.contents(half) == before


def test_another_weight_is_refused(folder: Path, half: Path, tmp_path: Path):
    with pytest.raises(ResumeError, match="was begun with source ") as caught:
        run(other_weight(folder, tmp_path / "m"), half)
    assert "accept" not in caught.value.remedy


def test_a_complete_artifact_of_other_conditions_is_refused(folder: Path, tmp_path: Path):
    out = tmp_path / "q"
    run(folder, out, algorithm="rtn", batches=None)
    with pytest.raises(Problems, match=r'algorithm\.kind "rtn", now "mse"'):
        run(folder, out, algorithm="mse", batches=None)
    seen = run(folder, out, algorithm="mse", batches=None, overwrite=True)
    assert segments(seen) == list(range(LAYERS + 1))


def test_other_machines_are_refused_by_name(folder: Path, half: Path):
    manifest = json.loads((half / "ongrid.json").read_text())
    manifest["fingerprint"] |= {"threads": 64, "capability": "AVX1024", "torch": "9.9"}
    (half / "ongrid.json").write_text(json.dumps(manifest))
    with pytest.raises(Problems) as caught:
        run(folder, half)
    assert len(caught.value.problems) == 3
    for part in ("threads 64", 'capability "AVX1024"', 'torch "9.9"'):
        assert part in str(caught.value)


def test_what_is_accepted_is_recorded(folder: Path, half: Path):
    with pytest.raises(ResumeError, match=r"algorithm\.damp"):
        run(folder, half, algorithm="gptq:damp=0.05", accept=["data", "torch"])
    seen = run(folder, half, algorithm="gptq:damp=0.05", accept=["algorithm"])
    assert segments(seen) == [2, 3, 4]
    artifact = ongrid.Artifact.open(half)
    assert [*artifact.manifest.accepted] == ["algorithm"]
    assert artifact.manifest.algorithm["damp"] == 0.01
    notes = artifact.records()["layer-00003"]["notes"]
    assert {note["damp"] for note in notes.values()} == {0.05}


def test_kept_inputs_of_other_batches_are_refused(folder: Path, half: Path):
    """`accept` may let other data in, but not hidden states that belong to no batch of them."""
    with pytest.raises(ResumeError, match="kept inputs"):
        run(folder, half, batches=data()[:2], accept=["data"])
    longer = [*toy.batches(2), toy.padded([5, 13], side="left")]
    with pytest.raises(ResumeError, match="kept inputs"):
        run(folder, half, batches=longer, accept=["data"])


# ---- models in memory ------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(0, "forward"), (2, "forward"), (4, "outside"), None])
def test_a_model_in_memory_is_as_if_nothing_had_stopped_it(
    stop: tuple[int, str] | None, tmp_path: Path
):
    """Layers that an earlier process has finished are put back from the artifact."""

    def build() -> Any:
        return toy.build(num_hidden_layers=LAYERS, tie_word_embeddings=False)

    expected = build()
    ongrid.quantize(expected, RECIPE, data(), algorithm="gptq")

    def stopping(progress: Progress) -> None:
        if (progress.segment, progress.phase) == stop:
            raise Stop

    out, settings = tmp_path / "q", {"algorithm": "gptq", "out": tmp_path / "q"}
    if stop is None:
        ongrid.quantize(build(), RECIPE, data(), **settings)
    else:
        with pytest.raises(Stop):
            ongrid.quantize(build(), RECIPE, data(), **settings, on_progress=stopping)
    resumed = build()
    assert ongrid.quantize(resumed, RECIPE, data(), **settings) is resumed
    assert ongrid.Artifact.open(out).damage() == []
    state = resumed.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(t, state[name]) for name, t in expected.state_dict().items())
    with torch.no_grad():
        assert torch.equal(resumed(**data()[0]).logits, expected(**data()[0]).logits)


# ---- random states ---------------------------------------------------------------------------

STATES = """
    import random, sys
    import numpy as np, torch
    import toy, test_resume
    from pathlib import Path
    from ongrid import quantize

    folder, out = map(Path, sys.argv[1:])
    recipe = toy.recipe("int4.32.code.fp16", ("*.layers.*.input_quantizer", "int8.tensor.sym.fp32"))
    model = toy.build().train()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for source, name in ((model, "live"), (folder, "disk")):
        quantize(source, recipe, test_resume.data(), algorithm="gptq", out=out / name)
        assert random.getstate() == before[0], name
        assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1])), name
        assert torch.equal(torch.get_rng_state(), before[2]), name
"""


@pytest.mark.alone
def test_no_global_random_state_moves(folder: Path, tmp_path: Path):
    """In a process without beartype, whose checks of lists draw from `random`."""
    assert python(STATES, folder, tmp_path / "q") == 0
