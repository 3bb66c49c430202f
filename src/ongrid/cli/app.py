"""The commands: quantize, adopt, plan, inspect, score, verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ongrid.adopt import adopt as run_adopt
from ongrid.calibrate.algorithm import ALGORITHMS
from ongrid.cli.progress import shown
from ongrid.errors import OngridError
from ongrid.quantize import plan as make_plan
from ongrid.quantize import quantize as run_quantize
from ongrid.recipe import presets
from ongrid.store.artifact import Artifact, is_artifact
from ongrid.store.shards import ShardFolder

app = typer.Typer(
    help="Quantize a language model, and prove that what is on disk is what was calibrated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Model = Annotated[str, typer.Argument(help="A Hugging Face model folder, or a hub id owner/name.")]
Folder = Annotated[Path, typer.Argument(help="An artifact that `ongrid quantize` wrote.")]
RecipeName = Annotated[
    str, typer.Option("--recipe", "-r", help=f"A YAML file, or one of: {', '.join(presets())}.")
]
Seqlen = Annotated[int, typer.Option(help="Tokens in a row.", min=2)]
Rows = Annotated[int, typer.Option(help="Rows to use.", min=1)]


def main() -> None:
    """Runs the command line; a deliberate error ends it with its message and exit code 1."""
    try:
        app()
    except OngridError as error:
        message = Text.assemble((type(error).__name__, "bold red"), ": ", str(error))
        Console(stderr=True).print(message, soft_wrap=True)
        raise SystemExit(1) from None


@app.command()
def quantize(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the artifact.")],
    recipe: RecipeName = "int4_g64",
    algorithm: Annotated[
        str,
        typer.Option("--algorithm", "-a", help=f"{', '.join(ALGORITHMS)}; gptq:damp=0.05"),
    ] = "gptq",
    data: Annotated[
        str | None,
        typer.Option(help="Calibration text (.txt), rows (.jsonl), a dataset, or pydoc."),
    ] = None,
    seqlen: Seqlen = 512,
    rows: Rows = 64,
    batch_rows: Annotated[
        int | None,
        typer.Option(help="Rows in a batch, which is a step of what trains.", min=1),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Empty the output folder first.")] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="A field, such as torch, that may differ when resuming; repeatable."),
    ] = None,
) -> None:
    """Quantize a model layer by layer. A run that was stopped goes on where it stopped."""
    chosen = make_plan(model, recipe)
    console.print(chosen.explain(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{chosen.bits_per_weight:.3f} bits per quantized weight", highlight=False)
    batches = (
        None
        if data is None
        else _Lazy(model, data, seqlen=seqlen, rows=rows, batch_rows=batch_rows)
    )
    with shown(console, escape(f"{Path(recipe).stem} {algorithm}")) as on_progress:
        run_quantize(
            model,
            recipe,
            batches,
            algorithm=algorithm,
            out=out,
            overwrite=overwrite,
            accept=accept or (),
            on_progress=on_progress,
        )
    console.print(f"wrote {out}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def adopt(
    model: Annotated[
        str, typer.Argument(help="A folder or hub id that GPTQ or compressed-tensors wrote.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the artifact.")],
    overwrite: Annotated[bool, typer.Option(help="Empty the output folder first.")] = False,
) -> None:
    """Take over a model that is quantized already, with its codes, scales and zeros."""
    artifact = run_adopt(model, out, overwrite=overwrite)
    _grids(artifact)
    console.print(f"wrote {out}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def plan(model: Model, recipe: RecipeName = "int4_g64") -> None:
    """Show what a recipe means for a model. No weight is read."""
    chosen = make_plan(model, recipe)
    console.print(chosen.explain(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{chosen.bits_per_weight:.3f} bits per quantized weight", highlight=False)


@app.command()
def inspect(folder: Folder) -> None:
    """Show what an artifact holds and how it was made."""
    artifact = Artifact.open(folder)
    manifest = artifact.manifest
    _fact("recipe", manifest.recipe["name"])
    _fact("algorithm", _settings(manifest.algorithm))
    _grids(artifact)
    for path, why in sorted(manifest.kept.items())[:10]:
        _fact("kept float", f"{path} ({why})")
    _fact("size", f"{artifact.tensors().nbytes / 1e6:.1f} MB")
    for name, value in sorted(manifest.fingerprint.items()):
        if name not in ("recipe", "algorithm"):
            _fact(name, value if isinstance(value, str) else json.dumps(value))
    if manifest.accepted:
        _fact("accepted", ", ".join(manifest.accepted))
    _notes(artifact)


@app.command()
def score(
    folder: Folder,
    against: Annotated[str, typer.Option(help="The float model it was made from.")],
    data: Annotated[str, typer.Option(help="Text to score on, or pydoc.")] = "pydoc",
    seqlen: Seqlen = 512,
    rows: Rows = 16,
) -> None:
    """Perplexity, mean KL per token to the original, and top-1 agreement, side by side."""
    from ongrid.hf import load_model, score_all, text, windows
    from ongrid.hf.load import load_tokenizer, local_folder

    if is_artifact(folder):
        Artifact.open(folder)  # refuses one that is not complete
    original = local_folder(against)
    source = text.scoring_text() if data == text.NAME else Path(data)
    ids = windows(source, load_tokenizer(original), seqlen, rows)
    reference, name = "original", folder.resolve().name
    if name == reference:
        name = f"{name} (quantized)"
    models = {reference: load_model(original), name: load_model(folder)}
    scores = score_all(models, ids, against=models[reference])
    sizes = {reference: ShardFolder(original).nbytes, name: ShardFolder(folder).nbytes}
    print_scores(
        {name: (found, sizes[name]) for name, found in scores.items()},
        f"{rows} windows of {seqlen} tokens of {data}",
    )


@app.command()
def verify(folder: Folder) -> None:
    """Prove from the files alone that they hold the weights that calibration used."""
    from ongrid.export.verify import verify as run_verify

    found = run_verify(folder, fresh_module="ongrid.hf.fresh")
    for line in found.lines():
        console.print(line, highlight=False, markup=False)
    if not found.ok:
        raise typer.Exit(1)


def print_scores(rows: dict[str, tuple[Any, int]], title: str) -> None:
    """One table of scores: name, perplexity, KL, top-1 agreement, size of the weights on disk."""
    table = Table(title=Text(title, style="table.title"))
    for heading in ("model", "perplexity", "KL per token", "top-1", "MB"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, (found, size) in rows.items():
        table.add_row(
            Text(name),
            f"{found.perplexity:.3f}",
            "" if found.kl is None else f"{found.kl:.4f}",
            "" if found.top1 is None else f"{100 * found.top1:.1f} %",
            f"{size / 1e6:.1f}",
        )
    console.print(table)


class _Lazy:
    """Calibration batches that are tokenised when they are read, after all checks have passed."""

    def __init__(self, model: str, data: str, **sizes: Any) -> None:
        self.model, self.data, self.sizes = model, data, sizes

    def __iter__(self) -> Any:
        from ongrid.hf import calibration_batches

        return iter(calibration_batches(self.model, self.data, **self.sizes))


def _fact(name: str, value: str) -> None:
    console.print(f"{name:<12} {value}", highlight=False, markup=False, soft_wrap=True)


def _settings(algorithm: dict[str, Any]) -> str:
    settings = ", ".join(f"{k}={v}" for k, v in algorithm.items() if k != "kind")
    return f"{algorithm['kind']}({settings})"


def _grids(artifact: Artifact) -> None:
    grids: dict[str, int] = {}
    for entry in artifact.manifest.matrices.values():
        grids[entry["grid"]] = grids.get(entry["grid"], 0) + 1
    for grid, count in sorted(grids.items()):
        _fact("matrices", f"{count} on {grid}")


def _notes(artifact: Artifact) -> None:
    """What calibration had to report: dead inputs, rows kept at plain rounding, underflow."""
    totals: dict[str, int] = {}
    for record in artifact.records().values():
        for note in record["notes"].values():
            for name, value in note.items():
                if isinstance(value, int) and name not in ("tokens", "steps") and value:
                    totals[name] = totals.get(name, 0) + value
                elif name == "rounded_plainly":
                    totals["matrices rounded plainly"] = (
                        totals.get("matrices rounded plainly", 0) + 1
                    )
    for name, count in sorted(totals.items()):
        console.print(f"{name.replace('_', ' ')}: {count}", highlight=False)
