"""`trueup evaluate`: measure models under corruptions, with every method."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from trueup_lab.cli.options import DataRootOption
from trueup_lab.cli.progress import passes
from trueup_lab.cli.train import check_limit, parse_seeds

if TYPE_CHECKING:
    from trueup_lab.evaluation import EvaluationRow

DEFAULTS = ["uncorrected", "default", "correct", "evidence", "bn-mix", "bn-batch"]


def evaluate_command(
    models: Annotated[list[str], typer.Argument(help="Model files, or names of bundled models.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method as spelled in tables, such as correct:lambda1=1.0,lambda2=0.2 or bn-mix:prior=16; repeatable "
            f"(default: {', '.join(DEFAULTS)})."
        ),
    ] = None,
    corruption: Annotated[list[str] | None, typer.Option(help="Only this corruption; repeatable.")] = None,
    severity: Annotated[list[int] | None, typer.Option(help="Only this severity; repeatable.", min=1, max=5)] = None,
    stream: Annotated[
        str, typer.Option(help="Order of test images: single, corruption, mixed or sorted.")
    ] = "corruption",
    batch: Annotated[int, typer.Option(help="Batch size, for methods whose answers depend on it.", min=1)] = 200,
    images: Annotated[int | None, typer.Option(help="Images per test set (default: all).", min=1)] = None,
    calibrate: Annotated[int | None, typer.Option(help="Clean images for calibration (default: all).", min=1)] = None,
    set_aside: Annotated[
        int,
        typer.Option(help="Segmentation: calibrate on every N-th test image, test on the others (0: training images)."),
    ] = 0,
    seeds: Annotated[str | None, typer.Option(help="Only these models of a file, such as 0-9 or 0,3.")] = None,
    data: DataRootOption = None,
    seed: Annotated[int, typer.Option(help="Random seed for generated images and their order.")] = 0,
    origin: Annotated[str | None, typer.Option(help="Use only published or only generated images.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... (default: a GPU if there is one).")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop cleanly within this many seconds.", min=0)] = None,
    targets: Annotated[Path, typer.Option(help="Folder where targets are kept for the next run.")] = Path(
        "runs/targets"
    ),
    out: Annotated[Path, typer.Option(help="CSV file to append rows to.")] = Path("runs/evaluation.csv"),
) -> None:
    """Evaluate models under corruptions, with trueup's rules and with rival methods.

    Rows are appended to OUT as they are measured, and never measured twice: after an interruption, run the same
    command again to continue. Runs on the CPU, on one GPU, or in the processes that torchrun starts.
    """
    from trueup import __version__
    from trueup_lab.evaluation import Plan, evaluate, parse_method, read_subjects
    from trueup_lab.evaluation.sets import FAMILIES
    from trueup_lab.processes import own_device, together

    check_limit(time_limit)
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
        set_aside=set_aside,
    )
    place = own_device(device)
    subjects = [s for name in models for s in read_subjects(name, None if seeds is None else parse_seeds(seeds))]
    if severity and any(FAMILIES[subject.set] == "mnist-c" for subject in subjects):
        raise ValueError("--severity has no effect on MNIST-C, which has one severity per corruption; leave it out")
    with together() as processes, passes(quiet=processes.rank > 0) as report:
        found = evaluate(
            subjects,
            plan,
            out,
            root=data,
            device=place,
            targets=targets,
            time_limit=time_limit,
            processes=processes,
            report=report,
        )
        first = processes.rank == 0
    if not first:
        return
    for table in summaries(found.rows):
        Console().print(table)
    for model in dict.fromkeys(model for model, _ in found.left_out):
        methods = dict.fromkeys(name for other, name in found.left_out if other == model)
        typer.echo(f"{model} has no batch norm, so these were left out: {', '.join(methods)}")
    old = [row.trueup for row in found.rows if row.trueup != __version__]
    if old:
        typer.echo(
            f"{len(old)} of these {len(found.rows)} rows were measured by trueup {', '.join(sorted(set(old)))}, not by "
            f"{__version__}; another --out measures them again"
        )
    there = f"{out}: {len(found.rows)} rows of this command"
    again = f"stopped at the time limit; run the same command again to continue ({there} so far)"
    typer.echo(there if found else again)


def summaries(rows: list[EvaluationRow]) -> list[Table]:
    """Return one table per model, one line per method: its needs, and means over seeds and corrupted sets."""
    return [_summary(name, [row for row in rows if row.model == name]) for name in dict.fromkeys(r.model for r in rows)]


def _summary(name: str, rows: list[EvaluationRow]) -> Table:
    seeds = len({row.seed for row in rows})
    score = "mean_iou" if hasattr(rows[0], "mean_iou") else "accuracy"
    what = "mean IoU" if score == "mean_iou" else score
    title = f"{name}, {seeds} model{'s' * (seeds > 1)}: {what} in %, calibration error in %, milliseconds per image"
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
            _mean([getattr(row, score) for row in mine if row.corruption == "identity"]),
            _mean([getattr(row, score) for row in corrupted]),
            _mean([getattr(row, score) for row in corrupted if row.severity == 5]),
            _mean([row.calibration_error for row in corrupted]),
            _mean([row.ms for row in mine]),
        )
    return table


def _mean(values: list[float]) -> str:
    return f"{fmean(values):.2f}" if values else "-"
