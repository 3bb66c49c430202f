"""The door to quantization: a model and a recipe in, an artifact or the quantized model out."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ongrid._config import to_plain
from ongrid._version import VERSION
from ongrid.calibrate.algorithm import ALGORITHMS, AbstractAlgorithm, parse_algorithm
from ongrid.calibrate.data import Batches, ModelCall, data_fingerprint, read_calls
from ongrid.calibrate.walk import OnProgress, Progress, walk
from ongrid.errors import (
    CalibrationError,
    OngridError,
    Problems,
    StoreError,
    StructureError,
    raise_all,
)
from ongrid.nn import (
    WEIGHT,
    QuantizerSpec,
    QuantLinear,
    find_linears,
    find_others,
    find_stack,
)
from ongrid.recipe import Plan, Recipe
from ongrid.store.artifact import (
    REST,
    Artifact,
    Manifest,
    dtype_name,
    layer_segment,
    refuse_folder,
    side_files,
)
from ongrid.store.paging import AbstractSource, LiveSource

__all__ = ["Progress", "plan", "quantize"]


@dataclass(frozen=True)
class _Job:
    """A model ready to be walked, the source of its weights, and what its folder brings along."""

    model: nn.Module
    source: AbstractSource
    folder: Path | None
    config: dict[str, Any]
    plan: Plan
    unties: bool
    """Whether a weight is quantized that the source ties to another: they part ways."""


def plan(model: str | Path | nn.Module, recipe: str | Path | Mapping[str, Any] | Recipe) -> Plan:
    """What a recipe means for a model: `print(plan(...).explain())`. No weight is read."""
    return _prepare(model, Recipe.load(recipe)).plan


def quantize(
    model: str | Path | nn.Module,
    recipe: str | Path | Mapping[str, Any] | Recipe = "int4_g64",
    batches: Batches | None = None,
    *,
    algorithm: str | AbstractAlgorithm = "rtn",
    out: str | Path | None = None,
    overwrite: bool = False,
    accept: Collection[str] = (),
    on_progress: OnProgress = lambda progress: None,
) -> Artifact | nn.Module:
    """Quantizes a model one decoder layer at a time.

    `model`: a live model (changed in place and returned), or a Hugging Face folder or hub id (read
    layer by layer; needs `out`, and the `Artifact` is returned). `batches`: dictionaries of model
    arguments, tensors of token ids [rows tokens], or a function that runs a model over them; only
    read where the algorithm needs data. `out`: the artifact's folder; a run that was stopped there
    goes on where it stopped, if nothing that decides its bits has changed, but for the fingerprint
    fields named in `accept`. `overwrite` empties the folder first.

    All problems with recipe, shapes, algorithm and folder are raised together, before any layer is
    touched. Law: the weights that the artifact holds are, bit for bit, those that the layers used.
    """
    recipe = Recipe.load(recipe)
    chosen = parse_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    folder = None if out is None else Path(out)
    job = _checked(model, recipe, chosen, folder, overwrite)
    calls: list[ModelCall] = []
    if chosen.needs_inputs(job.plan.quantizers):
        if batches is None:
            raise CalibrationError(
                f"{type(chosen).__name__} needs calibration data",
                remedy="Give `batches` (--data), or use an algorithm without data: rtn, mse.",
            )
        calls = read_calls(job.model, batches)
    if folder is None:
        walk(job.model, job.plan, chosen, job.source, calls, None, on_progress)
        return job.model
    artifact = Artifact.begin(
        folder, _manifest(job, recipe, chosen, calls), overwrite=overwrite, accept=accept
    )
    if not artifact.complete or job.source.stays:
        # Into a model in memory, what is done already is put back.
        walk(job.model, job.plan, chosen, job.source, calls, artifact, on_progress)
    if not artifact.complete:
        artifact.finish(
            served_config(
                job.config,
                job.plan.quantizers,
                {entry["dtype"] for entry in artifact.manifest.matrices.values()},
                unties=job.unties,
            ),
            [] if job.folder is None else side_files(job.folder),
        )
    return job.model if isinstance(model, nn.Module) else artifact


def _checked(
    model: str | Path | nn.Module,
    recipe: Recipe,
    algorithm: AbstractAlgorithm,
    folder: Path | None,
    overwrite: bool,
) -> _Job:
    """The prepared job; every problem that can be known without weights and data, in one error."""
    problems: list[OngridError] = []
    if folder is not None:
        problems += refuse_folder(folder, overwrite=overwrite)
    elif not isinstance(model, nn.Module):
        problems.append(
            StoreError("a model read from disk needs an output folder", remedy="Give `out`.")
        )
    job = None
    try:
        job = _prepare(model, recipe)
    except OngridError as error:
        problems += error.problems if isinstance(error, Problems) else [error]
    if job is not None:
        problems += algorithm.check(job.plan.quantizers) + _unfit(job)
        if folder is not None and job.folder is not None:
            same = folder.resolve() == job.folder.resolve()
            problems += [
                StoreError(
                    "the output folder is the model's own folder",
                    where=str(folder),
                    remedy="Choose another one: the source is read while the artifact is written.",
                )
            ] * same
    raise_all(problems)
    assert job is not None
    return job


def _unfit(job: _Job) -> list[OngridError]:
    """What of a model itself cannot be quantized, or not be written as one artifact."""
    problems: list[OngridError] = []
    linears = {path: job.model.get_submodule(path) for path in job.plan.sites}
    done = [path for path, linear in linears.items() if isinstance(linear, QuantLinear)]
    if done:
        problems.append(
            StructureError(
                f"{len(done)} linears are quantized already, {done[0]} among them",
                remedy="Start from the float model, or continue from the artifact.",
            )
        )
    weights: list[Any] = [linear.weight for linear in linears.values()]
    dtypes = {dtype_name(weight.dtype) for weight in weights}
    if len(dtypes) > 1:
        problems.append(
            StructureError(
                f"the linears to be quantized have several dtypes: {', '.join(sorted(dtypes))}",
                remedy="Cast the model to one dtype: a loader reads all of it in one.",
            )
        )
    return problems


def _prepare(model: str | Path | nn.Module, recipe: Recipe) -> _Job:
    from ongrid.hf.load import PLAIN, TRANSPOSED, load_hollow, source_config

    if isinstance(model, nn.Module):
        config = getattr(model, "config", None)
        plain = json.loads(config.to_json_string()) if config is not None else {}
        job = (model, LiveSource(model), _origin(model), plain)
    else:
        hollow = load_hollow(model)
        job = (hollow.model, hollow.source, hollow.folder, source_config(hollow.folder))
    stack = find_stack(job[0], recipe.layers)
    sites = find_linears(job[0], TRANSPOSED, PLAIN)
    resolved = recipe.resolve(sites, stack, find_others(job[0], sites))
    return _Job(*job, resolved, unties(job[0], resolved.sites))


def unties(model: nn.Module, paths: Collection[str]) -> bool:
    """Whether the weight of one of these linears is tied to another, and so parts from it."""
    names: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    weights = (model.get_submodule(path).weight for path in paths)
    return any(names.get(id(weight), 0) > 1 for weight in weights)


def _origin(model: nn.Module) -> Path | None:
    """The folder a live model was loaded from, whose tokenizer and other files travel along."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None


def _manifest(
    job: _Job, recipe: Recipe, algorithm: AbstractAlgorithm, calls: list[ModelCall]
) -> Manifest:
    settings = to_plain(algorithm, ALGORITHMS)
    weights: dict[str, Any] = {p: job.model.get_submodule(p).weight for p in job.plan.sites}
    return Manifest(
        fingerprint={
            "source": job.source.digest(),
            "recipe": recipe.to_plain(),
            "algorithm": settings,
            "data": data_fingerprint(calls) if calls else None,
            "config": job.config,
            "attention": getattr(getattr(job.model, "config", None), "_attn_implementation", None),
            "devices": sorted({p.device.type for p in job.model.parameters()} - {"meta"}),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "ongrid": VERSION,
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        recipe=recipe.to_plain(),
        algorithm=settings,
        segments=[layer_segment(i) for i in range(job.plan.stack.size)] + [REST],
        matrices={
            path: {
                "grid": str(job.plan.quantizers[f"{path}.{WEIGHT}"].grid),
                "shape": list(site.shape),
                "dtype": dtype_name(weights[path].dtype),
                "transposed": site.transposed,
            }
            for path, site in job.plan.sites.items()
        },
        activations={
            path: {"grid": str(spec.grid), "dynamic": spec.dynamic}
            for path, spec in job.plan.quantizers.items()
            if not path.endswith(WEIGHT)
        },
        kept=dict(job.plan.kept),
    )


def served_config(
    source: Mapping[str, Any],
    specs: Mapping[str, QuantizerSpec],
    dtypes: Collection[str],
    *,
    unties: bool,
) -> dict[str, Any]:
    """The source's config with our quantizers in place of its own, and their compute dtype."""
    from ongrid.hf.quantizer import quantization_config

    config = {**source, "quantization_config": quantization_config(specs)}
    # The dtype that the layers computed in, whatever the source's config says: a live model may
    # have been cast, and a config without a dtype leaves it to the loader.
    for dtype in dtypes:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        if "text_config" in config:
            config["text_config"] = {**config["text_config"], "dtype": dtype}
    if unties:
        config["tie_word_embeddings"] = False
        if "tie_word_embeddings" in config.get("text_config", {}):
            config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return config
