"""The door for models that another tool has quantized: their folder becomes an artifact.

Codes, scales and zeros are taken over as they are, so that tuning starts from the very matrices
that were published:

    ongrid.adopt("model-gptq-4bit", "model")
    model = ongrid.load("model")
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ongrid._version import VERSION
from ongrid.calibrate.walk import stored_state
from ongrid.errors import OngridError, Problems, StoreError, raise_all
from ongrid.export.reader import AbstractReader, ForeignLinear, open_reader
from ongrid.grid import Grid
from ongrid.nn import (
    WEIGHT,
    CodedWeight,
    LinearSite,
    QuantizerSpec,
    Stack,
    find_linears,
    find_others,
    find_stack,
)
from ongrid.quantize import served_config, unties
from ongrid.recipe import Recipe, Rule
from ongrid.store.artifact import (
    REST,
    Artifact,
    Manifest,
    dtype_name,
    layer_segment,
    refuse_folder,
    side_files,
)
from ongrid.store.paging import ShardSource
from ongrid.store.shards import ShardFolder, tensor_hash

FLOAT_IN_SOURCE = "float in the source"


@dataclass(frozen=True)
class _Job:
    """A foreign folder, judged: every linear that is quantized in it, and the grid it lies on."""

    folder: Path
    config: dict[str, Any]
    reader: AbstractReader
    model: nn.Module
    source: ShardSource
    sites: Mapping[str, LinearSite]
    stack: Stack
    linears: Mapping[str, ForeignLinear]
    grids: Mapping[str, Grid]

    @property
    def specs(self) -> dict[str, QuantizerSpec]:
        return {f"{path}.{WEIGHT}": QuantizerSpec(grid) for path, grid in self.grids.items()}

    def segments(self) -> dict[str, str]:
        """The name of every segment, and what the paths of its modules begin with."""
        layers = {layer_segment(i): f"{path}." for i, path in enumerate(self.stack.paths)}
        return {**layers, REST: ""}

    def segment_of(self, name: str) -> str:
        return next(s for s, head in self.segments().items() if name.startswith(head))


def adopt(folder: str | Path, out: str | Path, *, overwrite: bool = False) -> Artifact:
    """An artifact with the codes, scales and zeros of a model that is quantized already.

    `folder`: a Hugging Face folder or hub id in one of the formats of `READERS` (GPTQ,
    compressed-tensors). Nothing is rounded: codes are packed anew, all other tensors are taken over
    bit by bit. One decoder layer is held at a time; a run that was stopped goes on when it is
    repeated. `overwrite` empties `out` first.

    Raises everything that cannot be adopted exactly, all of it together, before a byte is written.
    """
    out = Path(out)
    job = _checked(folder, out, overwrite=overwrite)
    artifact = Artifact.begin(out, _manifest(job), overwrite=overwrite)
    if not artifact.complete:
        _write(job, artifact)
    return artifact


# ---- judging ------------------------------------------------------------------------------------


def _checked(name: str | Path, out: Path, *, overwrite: bool) -> _Job:
    problems: list[OngridError] = [*refuse_folder(out, overwrite=overwrite)]
    if Path(name).is_dir() and Path(name).resolve() == out.resolve():
        remedy = "Choose another one: the source is read while the artifact is written."
        what = "the output folder is the model's own folder"
        problems.append(StoreError(what, where=str(out), remedy=remedy))
    job = None
    try:
        job = _judged(name)
    except OngridError as error:
        problems += _each(error)
    raise_all(problems)
    assert job is not None
    return job


def _judged(name: str | Path) -> _Job:
    from ongrid.hf.load import (
        PLAIN,
        TRANSPOSED,
        decoder_config,
        file_names,
        hollow_model,
        local_folder,
        source_config,
    )

    folder = local_folder(name)
    config = source_config(folder)
    problems: list[OngridError] = []
    reader = shards = None
    try:
        reader = open_reader(config.get("quantization_config"))
    except OngridError as error:
        problems += [problem.at(str(folder)) for problem in _each(error)]
    try:
        shards = ShardFolder(folder)
    except OngridError as error:
        problems += _each(error)
    raise_all(problems)
    assert reader is not None and shards is not None
    model = hollow_model(decoder_config(folder), shards)
    sites = find_linears(model, TRANSPOSED, PLAIN)
    linears, problems = _placed(reader, shards, model, sites)
    source = None
    try:
        names = file_names(model, shards, {f"{path}.weight" for path in linears})
        problems += _strange(linears, shards, names)
        source = ShardSource(model, shards, names)
    except OngridError as error:
        remedy = "Fetch the folder again, or load it with the tool that wrote it, and save it anew."
        problems += [StoreError(e.what, where=e.where, remedy=remedy) for e in _each(error)]
    grids: dict[str, Grid] = {}
    for path, linear in linears.items():
        try:
            grids[path] = reader.check(linear)
        except OngridError as error:
            problems += _each(error)
    raise_all(_alike(problems))
    assert source is not None
    stack = find_stack(model)
    return _Job(folder, config, reader, model, source, sites, stack, linears, grids)


def _placed(
    reader: AbstractReader, shards: ShardFolder, model: Any, sites: Mapping[str, LinearSite]
) -> tuple[dict[str, ForeignLinear], list[OngridError]]:
    """Every quantized linear of the files by its path in the model, and those without a place."""
    from ongrid.hf.load import spellings

    parts: dict[str, dict[str, str]] = {}
    for name in shards.infos:
        stem, _, part = name.rpartition(".")
        if part in reader.parts:
            parts.setdefault(stem, {})[part] = name
    linears: dict[str, ForeignLinear] = {}
    problems: list[OngridError] = []
    for stem, names in parts.items():
        path = next((p for p in spellings(model, stem) if p in sites and p not in linears), None)
        if path is None:
            what = "is quantized in the files, but is no linear layer of this model"
            remedy = "Only linear layers can be adopted: no embeddings, no fused experts."
            problems.append(StoreError(what, where=stem, remedy=remedy))
            continue
        dtype = model.get_submodule(path).weight.dtype
        linears[path] = ForeignLinear(path, stem, sites[path].shape, dtype, names, shards)
    if not parts:
        problems.append(
            StoreError(
                f"no linear is quantized: no tensor is called {', '.join(sorted(reader.parts))}",
                where=str(shards.folder),
                remedy="The config and the weights belong to different models.",
            )
        )
    return linears, problems


def _strange(
    linears: Mapping[str, ForeignLinear], shards: ShardFolder, names: Mapping[str, str]
) -> list[OngridError]:
    """Tensors of quantized linears that nothing here reads; a bias of zeros means nothing."""
    stems = {linear.stem: path for path, linear in linears.items()}
    read = {*names.values(), *_claimed(linears)}
    problems: list[OngridError] = []
    for name in shards.infos:
        stem, _, part = name.rpartition(".")
        if stem not in stems or name in read:
            continue
        if part == "bias" and not bool(shards.read(name).any()):
            continue
        remedy = "What it adds to the layer is not known. Quantize the float model."
        what = f"has a tensor {part!r} that neither the format nor the model's layer has"
        problems.append(StoreError(what, where=stems[stem], remedy=remedy))
    return problems


def _claimed(linears: Mapping[str, ForeignLinear]) -> set[str]:
    return {name for linear in linears.values() for name in linear.names.values()}


def _each(error: OngridError) -> Sequence[OngridError]:
    return error.problems if isinstance(error, Problems) else [error]


def _alike(problems: Sequence[OngridError]) -> list[OngridError]:
    """One error for what many linears have in common: the first of them, and how many."""
    alike: dict[tuple[type[OngridError], str, str], list[str]] = {}
    for problem in problems:
        key = (type(problem), problem.what, problem.remedy)
        alike.setdefault(key, []).append(problem.where)
    return [
        kind(
            what,
            where=", ".join(places[:3])
            + (f" and {len(places) - 3} more" if len(places) > 3 else ""),
            remedy=remedy,
        )
        for (kind, what, remedy), places in alike.items()
    ]


# ---- writing ------------------------------------------------------------------------------------


@torch.no_grad()
def _write(job: _Job, artifact: Artifact) -> None:
    state = stored_state(job.model)
    homes = {name: job.segment_of(name) for name in (*state, *job.linears)}
    replaced = {f"{path}.weight" for path in job.linears}
    for segment in artifact.manifest.segments:
        if artifact.record(segment) is not None:
            continue  # an earlier run has done it
        tensors = {
            name: job.source.original(name, tensor)
            for name, tensor in state.items()
            if homes[name] == segment and name not in replaced
        }
        if segment == REST:
            tensors |= _surplus(job)
        used: dict[str, str] = {}
        for path, linear in job.linears.items():
            if homes[path] == segment:
                q = job.reader.read(linear)
                tensors |= {f"{path}.{WEIGHT}.{name}": t for name, t in q.tensors().items()}
                used[path] = tensor_hash(CodedWeight(q, linear.dtype)())
        artifact.write(segment, tensors, {"notes": {}, "used": used})
    specs, dtypes = job.specs, {dtype_name(linear.dtype) for linear in job.linears.values()}
    config = served_config(job.config, specs, dtypes, unties=unties(job.model, job.linears))
    kept = [file for file in side_files(job.folder) if file.name not in job.reader.stale]
    artifact.finish(config, kept)


def _surplus(job: _Job) -> dict[str, Tensor]:
    """What the files hold and the model has no place for; it travels along unchanged."""
    read = {*job.source.names.values(), *_claimed(job.linears)}
    shards = job.source.shards
    return {name: shards.read(name) for name in shards.infos if name not in read}


def _manifest(job: _Job) -> Manifest:
    recipe = _recipe(job.specs, job.sites).to_plain()
    algorithm = {"kind": "adopted", "format": job.config["quantization_config"]["quant_method"]}
    others = find_others(job.model, job.sites)
    kept = {path: FLOAT_IN_SOURCE for path in job.sites if path not in job.linears}
    return Manifest(
        # No arithmetic decides a bit here, so that nothing of the machine stands in it.
        fingerprint={
            "source": job.source.digest(),
            "recipe": recipe,
            "algorithm": algorithm,
            "config": job.config,
            "ongrid": VERSION,
        },
        recipe=recipe,
        algorithm=algorithm,
        segments=list(job.segments()),
        matrices={
            path: {
                "grid": str(job.grids[path]),
                "shape": list(linear.shape),
                "dtype": dtype_name(linear.dtype),
                "transposed": job.sites[path].transposed,
            }
            for path, linear in job.linears.items()
        },
        activations={},
        kept=kept | {path: w.why for path, w in others.items() if job.stack.holds(path)},
    )


def _recipe(specs: Mapping[str, QuantizerSpec], sites: Collection[str]) -> Recipe:
    """Rules that say of every linear which grid it was found on.

    Where all layers have the same grid in a place, one rule speaks of all of them.
    """
    paths = [f"{path}.{WEIGHT}" for path in sites]
    rules: dict[str, Rule] = {}
    for path, spec in specs.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", path)
        if pattern not in rules:
            alike = all(specs.get(p) == spec for p in fnmatch.filter(paths, pattern))
            match = pattern if alike else path
            rules[match] = Rule(match, str(spec.grid))
    # What no linear layer holds is float because it was found so, however much of the model it is.
    return Recipe("adopted", tuple(rules.values()), partial=True)
