"""The artifact's life on disk: begun, gone on with, damaged, overwritten. No model is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ongrid.errors import ConfigError, OngridError, ResumeError, StoreError
from ongrid.store.artifact import REST, Artifact, layer_segment, refuse_folder
from ongrid.store.manifest import ACCEPTABLE, Manifest

SEGMENTS = [layer_segment(0), layer_segment(1), REST]
FINGERPRINT = {"source": "s", "config": {"eps": 1e-5}, "recipe": {"rules": [1]}, "threads": 2}


def manifest(**changed: object) -> Manifest:
    return Manifest(
        fingerprint={**FINGERPRINT, **changed},
        recipe={},
        algorithm={},
        segments=SEGMENTS,
        matrices={},
        activations={},
        kept={},
    )


def fill(artifact: Artifact) -> None:
    """Writes what is missing, as a walk would."""
    for number, segment in enumerate(SEGMENTS):
        if artifact.record(segment) is None:
            artifact.write(segment, {f"t{number}": torch.arange(4.0) + number}, {"notes": {}})
    artifact.finish({"model_type": "toy"}, [])


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    fill(Artifact.begin(tmp_path / "q", manifest()))
    return tmp_path / "q"


def test_an_equal_run_finds_a_complete_artifact(complete: Path):
    assert Artifact.begin(complete, manifest()).complete
    assert Artifact.begin(complete, manifest(), overwrite=True).complete
    assert Artifact.open(complete).complete


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_damage_is_found_and_begun_again(complete: Path, damage: str):
    file = complete / f"model-{SEGMENTS[1]}.safetensors"
    whole = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "truncated":
        file.write_bytes(whole[:-3])
    else:
        file.unlink()
    again = Artifact.begin(complete, manifest())
    assert not again.complete
    assert not (complete / "config.json").exists()
    assert [again.record(s) is not None for s in SEGMENTS] == [True, False, True]
    fill(again)
    assert file.read_bytes() == whole
    assert Artifact.begin(complete, manifest()).complete


@pytest.mark.parametrize("field", FINGERPRINT)
def test_every_field_of_the_fingerprint_refuses(complete: Path, field: str):
    with pytest.raises(OngridError, match=field):
        Artifact.begin(complete, manifest(**{field: {"other": 1}}))


def test_the_innermost_difference_is_named(complete: Path):
    with pytest.raises(ResumeError, match=r"config\.eps 1e-05, now 0\.5"):
        Artifact.begin(complete, manifest(config={"eps": 0.5}))


@pytest.mark.parametrize("field", ["source", "config", "recipe", "nonsense"])
def test_what_would_mix_two_models_cannot_be_accepted(complete: Path, field: str):
    assert field not in ACCEPTABLE
    with pytest.raises(ConfigError, match=f"cannot differ in {field}"):
        Artifact.begin(complete, manifest(**{field: "other"}), accept=[field])


def test_what_was_accepted_once_is_recorded_and_stays_accepted(tmp_path: Path):
    Artifact.begin(tmp_path / "q", manifest())
    Artifact.begin(tmp_path / "q", manifest(threads=8), accept=["threads"])
    again = Artifact.begin(tmp_path / "q", manifest(threads=8))
    assert again.manifest.accepted == {"threads": [8]}
    with pytest.raises(ResumeError, match="threads 2, now 4"):
        Artifact.begin(tmp_path / "q", manifest(threads=4))


def test_a_run_killed_while_it_wrote_its_manifest_can_be_repeated(tmp_path: Path):
    folder = tmp_path / "q"
    folder.mkdir()
    (folder / ".ongrid.json.partial").write_bytes(b"{")
    assert refuse_folder(folder, overwrite=False) == []
    Artifact.begin(folder, manifest())
    assert [p.name for p in folder.iterdir()] == ["ongrid.json"]


def test_overwriting_goes_on_with_an_equal_run(tmp_path: Path):
    begun = Artifact.begin(tmp_path / "q", manifest(), overwrite=True)
    begun.write(SEGMENTS[0], {"t0": torch.arange(4.0)}, {})
    again = Artifact.begin(tmp_path / "q", manifest(), overwrite=True)
    assert again.record(SEGMENTS[0]) is not None


def test_overwriting_empties_the_folder_of_another_run(complete: Path):
    (complete / "model-00001-of-00009.safetensors").write_bytes(b"stale")
    Artifact.begin(complete, manifest(source="other"), overwrite=True)
    assert [p.name for p in complete.iterdir()] == ["ongrid.json"]


@pytest.mark.parametrize("names", [["thesis.txt"], ["config.json", "photos/"]])
def test_overwriting_refuses_what_is_no_models_folder(tmp_path: Path, names: list[str]):
    for name in names:
        path = tmp_path / "mine" / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_text("mine")
    before = sorted(p.name for p in (tmp_path / "mine").iterdir())
    assert refuse_folder(tmp_path / "mine", overwrite=True)
    with pytest.raises(StoreError, match="by hand"):
        Artifact.begin(tmp_path / "mine", manifest(), overwrite=True)
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == before


def test_a_shard_of_another_run_is_not_taken(complete: Path, tmp_path: Path):
    other = Artifact.begin(tmp_path / "other", manifest(source="other"))
    name = f"model-{SEGMENTS[0]}.safetensors"
    (other.folder / name).write_bytes((complete / name).read_bytes())
    assert other.record(SEGMENTS[0]) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"complete": true}', '{"complete": 1, "x": 2}'])
def test_a_damaged_manifest_is_said_to_be_damaged(complete: Path, text: str):
    (complete / "ongrid.json").write_text(text)
    with pytest.raises(StoreError):
        Artifact.open(complete)


def test_a_file_is_no_artifact(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="no artifact"):
        Artifact.open(tmp_path / "file")


def test_another_format_version_is_refused(complete: Path):
    plain = json.loads((complete / "ongrid.json").read_bytes())
    (complete / "ongrid.json").write_text(json.dumps({**plain, "format_version": 99}))
    with pytest.raises(OngridError, match="version 99"):
        Artifact.open(complete)
