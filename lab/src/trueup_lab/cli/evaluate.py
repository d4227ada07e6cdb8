"""`trueup evaluate`."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from trueup_lab.cli.progress import passes
from trueup_lab.cli.train import parse_seeds

if TYPE_CHECKING:
    from trueup_lab.evaluation import EvaluationRow

DEFAULTS = ["uncorrected", "correct", "evidence", "bn-mix", "bn-batch"]


def evaluate(
    models: Annotated[list[str], typer.Argument(help="Files of models, or names of those that come with trueup.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="As in tables, e.g. correct:lambda1=1.0,lambda2=0.2 or evidence:budget=0.02,least=0; may be "
            f"repeated. [{', '.join(DEFAULTS)}]"
        ),
    ] = None,
    corruption: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    severity: Annotated[list[int] | None, typer.Option(help="Only this one; may be repeated.", min=1, max=5)] = None,
    stream: Annotated[str, typer.Option(help="single, corruption, mixed or sorted.")] = "corruption",
    batch: Annotated[int, typer.Option(help="Images a batch, for methods that depend on it.", min=1)] = 200,
    images: Annotated[int | None, typer.Option(help="Of each test set; all if not given.", min=1)] = None,
    calibrate: Annotated[int | None, typer.Option(help="Clean images for targets; all if not given.", min=1)] = None,
    seeds: Annotated[str | None, typer.Option(help="Of a file with many models, as in 0-9 or 0,3.")] = None,
    data: Annotated[Path | None, typer.Option(help="The data root.")] = None,
    seed: Annotated[int, typer.Option(help="What generated images and the order of images depend on.")] = 0,
    origin: Annotated[str | None, typer.Option(help="Ask for published or generated images, and no others.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; default: a GPU if any.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop cleanly before this many seconds.")] = None,
    targets: Annotated[Path, typer.Option(help="Where calibrations are kept.")] = Path("runs/targets"),
    out: Annotated[Path, typer.Option(help="The CSV that rows are added to.")] = Path("runs/evaluation.csv"),
) -> None:
    """Test models under corruptions, with and without correction, and its rivals.

    Rows are added to OUT as they come; what is there is not measured again, so the same command goes on after an
    interruption. Runs on the CPU, one GPU, or as many processes as torchrun starts.
    """
    from trueup_lab.evaluation import Plan, parse_method, read_rows, read_subjects
    from trueup_lab.evaluation import evaluate as run
    from trueup_lab.processes import own_device, together

    try:
        subjects = [s for name in models for s in read_subjects(name, None if seeds is None else parse_seeds(seeds))]
        plan = Plan(
            methods=tuple(parse_method(text) for text in method or DEFAULTS),
            severities=tuple(severity or (1, 2, 3, 4, 5)),
            only=tuple(corruption or ()),
            stream=stream,  # type: ignore[arg-type]
            batch=batch,
            images=images,
            calibrate=calibrate,
            seed=seed,
            origin=origin,  # type: ignore[arg-type]
        )
        with together() as processes, passes(quiet=processes.rank > 0) as report:
            finished = run(
                subjects,
                plan,
                out,
                root=data,
                device=own_device(device),
                targets=targets,
                time_limit=time_limit,
                processes=processes,
                report=report,
            )
            first = processes.rank == 0
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if first:
        asked = {(subject.name, subject.checkpoint) for subject in subjects}
        rows = [row for row in read_rows(out) if (row.model, row.checkpoint) in asked]
        for table in summaries(rows):
            Console().print(table)
        typer.echo(
            f"{out}: {len(rows)} rows" if finished else f"stopped at the time limit; the same command goes on ({out})"
        )


def summaries(rows: list[EvaluationRow]) -> list[Table]:
    """A table a model, a line a method: what it needs, and its means over seeds and corrupted sets."""
    return [_summary(name, [row for row in rows if row.model == name]) for name in dict.fromkeys(r.model for r in rows)]


def _summary(name: str, rows: list[EvaluationRow]) -> Table:
    seeds = len({row.seed for row in rows})
    title = f"{name}, {seeds} model{'s' * (seeds > 1)}: accuracy in %, calibration error in %, milliseconds an image"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "needs", "stream"):
        table.add_column(column, overflow="fold", no_wrap=column == "stream")
    for column in ("clean", "corr.", "sev. 5", "cal.", "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for key in dict.fromkeys((row.method, row.needs, row.stream) for row in rows):
        mine = [row for row in rows if (row.method, row.needs, row.stream) == key]
        corrupted = [row for row in mine if row.corruption != "identity"]
        table.add_row(
            *key,
            _mean([row.accuracy for row in mine if row.corruption == "identity"]),
            _mean([row.accuracy for row in corrupted]),
            _mean([row.accuracy for row in corrupted if row.severity == 5]),
            _mean([row.calibration_error for row in corrupted]),
            _mean([row.ms for row in mine]),
        )
    return table


def _mean(values: list[float]) -> str:
    return f"{fmean(values):.2f}" if values else "-"
