"""Bad input: one error that names thing and remedy, and nothing that a loader would take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ongrid
import toy
from ongrid.errors import CalibrationError, NonFiniteError, OngridError, StoreError

SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return toy.save(toy.build(), tmp_path / "m", shards=3)


def refused(kind: type[OngridError], *args: Any, **kwargs: Any) -> str:
    """The message of the one error; no config and no index may lie in the output folder."""
    with pytest.raises(kind) as caught:
        ongrid.quantize(*args, **kwargs)
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    assert error.remedy, error
    out = kwargs.get("out")
    if out is not None and Path(out).is_dir() and str(out) != str(args[0]):
        assert not (Path(out) / "config.json").exists()
        assert not (Path(out) / "model.safetensors.index.json").exists()
        with pytest.raises(StoreError):
            ongrid.Artifact.open(Path(out))
    return str(error)


def gptq(source: Any, out: Path | None, batches: Any = None, recipe: Any = None) -> dict[str, Any]:
    return {
        "model": source, "recipe": recipe or toy.recipe(), "out": out, "algorithm": "gptq",
        "batches": toy.batches(1) if batches is None else batches,
    }  # fmt: skip


def poisoned() -> Iterator[Any]:
    raise AssertionError("the calibration set was read")
    yield


# ---- sources ---------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-100])


def unlist(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lose(name: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        for shard in sorted(folder.glob("*.safetensors")):
            tensors = load_file(shard)
            if tensors.pop(name, None) is not None:
                save_file(tensors, shard, metadata={"format": "pt"})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        del index["weight_map"][name]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return harm


def widen(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))


def config_with(**values: Any) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return harm


SOURCES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated": (truncate, [SECOND, "truncated"]),
    "missing shard": (lambda f: (f / SECOND).unlink(), [SECOND, "not in the folder"]),
    "missing config": (lambda f: (f / "config.json").unlink(), ["no config.json"]),
    "broken config": (lambda f: (f / "config.json").write_text("{"), ["config.json is not JSON"]),
    "index and files": (unlist, ["model.layers.1.mlp.up_proj.weight", "index"]),
    "lost tensor": (lose("model.layers.1.mlp.up_proj.weight"), ["layers.1.mlp.up_proj.weight"]),
    "other shapes": (widen, ["model.layers.0.mlp", "[96, 64]", "[128, 64]"]),
    "unknown model": (config_with(model_type="lama"), ["lama"]),
    "quantized": (
        config_with(quantization_config={"quant_method": "gptq"}), ["quantized already (gptq)"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SOURCES)
def test_sources(case: str, source: Path, tmp_path: Path):
    harm, parts = SOURCES[case]
    harm(source)
    with pytest.raises(OngridError) as caught:
        ongrid.quantize(**gptq(source, tmp_path / "q", poisoned()))
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert str(source) in message
    assert not (tmp_path / "q").exists()


def test_a_source_that_is_not_there(tmp_path: Path):
    message = refused(StoreError, tmp_path / "none", toy.recipe(), out=tmp_path / "q")
    assert "no such model folder" in message and str(tmp_path / "none") in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight",  # quantized
        "model.layers.0.input_layernorm.weight",  # kept in float
        "model.embed_tokens.weight",  # outside
    ],
)
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_non_finite_source_weights(
    algorithm: str, name: str, bad: float, source: Path, tmp_path: Path
):
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name].flatten()[3:5] = bad
            save_file(tensors, shard, metadata={"format": "pt"})
    data = {"recipe": toy.recipe(), "batches": toy.batches(1), "algorithm": algorithm}
    message = refused(NonFiniteError, source, **data, out=tmp_path / "q")
    assert name in message and "2 of" in message and str(source) in message
    live = toy.build()
    live.get_parameter(name).data.flatten()[3:5] = bad
    message = refused(NonFiniteError, live, **data, out=tmp_path / "live")
    assert name in message and "2 of" in message


# ---- output folders --------------------------------------------------------------------------


def test_an_output_folder_that_is_in_use(source: Path, tmp_path: Path):
    out = tmp_path / "q"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"not empty: thesis\.tex") as caught:
        ongrid.quantize(**gptq(source, out, poisoned()))
    message = str(caught.value)
    assert str(out) in message and "overwrite" in message
    assert toy.contents(out) == {"thesis.tex": b"years of work"}
    with pytest.raises(StoreError, match=r"no model's folder: thesis\.tex"):
        ongrid.quantize(**gptq(source, out), overwrite=True)
    assert toy.contents(out) == {"thesis.tex": b"years of work"}
    (out / "config.json").write_text("{}")
    (out / "sub").mkdir()
    with pytest.raises(StoreError, match="holds folders, which overwriting would not touch: sub"):
        ongrid.quantize(**gptq(source, out), overwrite=True)
    assert set(toy.contents(out)) == {"thesis.tex", "config.json"}


def test_an_output_folder_that_cannot_be(source: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="not a writable folder") as caught:
            ongrid.quantize(**gptq(source, out, poisoned()))
        assert str(out) in str(caught.value) and caught.value.remedy
    before = toy.contents(source)
    with pytest.raises(StoreError, match=r"the model's own folder|not empty"):
        ongrid.quantize(**gptq(source, source, poisoned()), overwrite=True)
    assert toy.contents(source) == before


def test_an_output_folder_without_permission(source: Path, tmp_path: Path):
    out = tmp_path / "locked" / "q"
    if os.geteuid() == 0:
        # Permissions do not bind root: a folder that the kernel keeps, instead.
        out = Path("/proc/self/task/q")
    else:
        out.parent.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="cannot be written") as caught:
        ongrid.quantize(**gptq(source, out))
    assert str(out) in str(caught.value) and caught.value.remedy


def test_a_model_from_disk_needs_an_output_folder(source: Path):
    with pytest.raises(StoreError, match="needs an output folder"):
        ongrid.quantize(**gptq(source, None, poisoned()))


def test_a_disk_that_is_full(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The third layer cannot be written: what is there stays, and a later run goes on."""
    ordinary = os.fsync
    left = [9]

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        ordinary(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    out = tmp_path / "q"
    message = refused(StoreError, source, toy.recipe(), toy.batches(1), algorithm="gptq", out=out)
    assert "No space left on device" in message and str(out) in message
    monkeypatch.undo()
    assert ongrid.quantize(**gptq(source, out)).complete  # type: ignore[union-attr]


# ---- batches ---------------------------------------------------------------------------------


ROW: list[Any] = [[1, 2, 3]]
BATCHES: dict[str, tuple[Any, list[str]]] = {
    "none": ([], ["no batch"]),
    "an empty loop": (lambda model: None, ["no batch"]),
    "texts": (["Once upon a time"], ["a calibration batch is a str", "token ids"]),
    "lists": ([[1, 2, 3]], ["a calibration batch is a list"]),
    "lists in a dictionary": (
        [{"input_ids": torch.ones(1, 3, dtype=torch.long)}, {"input_ids": ROW}],
        ["batch 1", "input_ids are list", "return_tensors"],
    ),
    "one row without its axis": ([torch.ones(5, dtype=torch.long)], ["batch 0", "(5,)"]),
    "floats": ([{"input_ids": torch.ones(1, 5)}], ["torch.float32 (1, 5)"]),
    "no row": ([torch.ones(0, 5, dtype=torch.long)], ["(0, 5) hold no token"]),
    "no token": ([torch.ones(2, 0, dtype=torch.long)], ["(2, 0) hold no token"]),
    "all padding": (
        [{"input_ids": toy.ids(2, 5), "attention_mask": torch.zeros(2, 5, dtype=torch.long)}],
        ["no token", "mask"],
    ),
    "a mask of another size": (
        [{"input_ids": toy.ids(2, 5), "attention_mask": torch.ones(2, 1, 1, 5)}],
        ["attention mask", "(2, 5)", "(2, 1, 1, 5)"],
    ),
}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("case", BATCHES)
def test_batches(case: str, live: bool, source: Path, tmp_path: Path):
    batches, parts = BATCHES[case]
    model = toy.build() if live else source
    recipe = toy.recipe()
    out = tmp_path / "q"
    message = refused(CalibrationError, model, recipe, batches, algorithm="gptq", out=out)
    assert all(part in message for part in parts), message


def test_arguments_that_a_model_does_not_take():
    class Strict(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = toy.build()

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.inner(input_ids, attention_mask, use_cache=False).logits

    batches = [{"input_ids": toy.ids(1, 5), "text": "Once"}]
    with pytest.raises(CalibrationError, match=r"batch 0: the model does not take .*'text'"):
        ongrid.quantize(Strict(), toy.recipe(), batches, algorithm="gptq")
    batches = [{"input_ids": toy.ids(1, 5)}]
    ongrid.quantize(Strict(), toy.recipe(), batches, algorithm="gptq")


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({**toy.recipe(), "algorithm": "gptq"}, "unknown key 'algorithm'"),
        (toy.recipe("int4.32.code.fp16", ("*.experts.*", None)), "rule 3 matches nothing"),
        (toy.recipe("int4.48.code.fp16"), "do not divide into blocks of 48"),
        ("int4_g46", "no recipe is called 'int4_g46'"),
    ],
)
def test_recipes(wrong: Any, part: str, source: Path, tmp_path: Path):
    with pytest.raises(OngridError) as caught:
        ongrid.quantize(**gptq(source, tmp_path / "q", poisoned(), wrong))
    assert part in str(caught.value) and caught.value.remedy
    assert not (tmp_path / "q").exists()


def test_data_that_is_missing(source: Path, tmp_path: Path):
    kwargs = {"algorithm": "gptq", "out": tmp_path / "q"}
    message = refused(CalibrationError, source, toy.recipe(), **kwargs)
    assert "Gptq needs calibration data" in message and "batches" in message
    assert not (tmp_path / "q").exists()


# ---- models ----------------------------------------------------------------------------------


def test_a_model_that_is_quantized_already(tmp_path: Path):
    model = toy.build()
    ongrid.quantize(model, toy.recipe())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(OngridError, match="quantized already") as caught:
        ongrid.quantize(model, toy.recipe(), out=tmp_path / "q")
    assert "q_proj" in str(caught.value) and caught.value.remedy
    assert all(torch.equal(tensor, state[n]) for n, tensor in model.state_dict().items())
    assert not (tmp_path / "q" / "config.json").exists()


def test_a_model_without_memory():
    from accelerate import init_empty_weights

    with init_empty_weights():
        model = type(toy.build())(toy.build().config)
    with pytest.raises(StoreError, match="parameters have no memory"):
        ongrid.quantize(model, toy.recipe())


def test_weights_that_the_compute_dtype_cannot_hold(tmp_path: Path):
    """The scale fits fp16, and so does the weight, but the grid's lowest level does not."""
    model = toy.build(dtype=torch.float16)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 60000.0
    with pytest.raises(
        OngridError, match=r"(?s)layers\.1\.mlp\.up_proj.*not finite in torch.float16"
    ):
        ongrid.quantize(model, toy.recipe("int4.32.sym.fp32"), out=tmp_path / "q")
    assert not (tmp_path / "q" / "config.json").exists()
