"""`trueup demo`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trueup import Correction, demo
from trueup.data import digits
from trueup.figures import draw_demo

PAPER = demo.PAPERS_MNIST


def show_demo(
    retrain: Annotated[bool, typer.Option(help="Train the network again first: a minute or two.")] = False,
    lambda1: Annotated[float, typer.Option(help="λ1, the weight of the training distribution.")] = PAPER.lambda1,
    lambda2: Annotated[float, typer.Option(help="λ2, the weight of what the image said.")] = PAPER.lambda2,
    iterations: Annotated[int, typer.Option(help="How often the two take turns.")] = PAPER.iterations,
    location: Annotated[str, typer.Option(help="keep a layer's mean, or match training's.")] = PAPER.location,
    images: Annotated[int, typer.Option(help="Digits in each test set.", min=1, max=digits.TEST)] = 120,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("demo"),
) -> None:
    """See the correction at work: digits under nine corruptions, with and without. Under a minute on two cores."""
    console = Console()
    try:
        correction = Correction(lambda1, lambda2, iterations, location)  # type: ignore[arg-type]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        if retrain:
            training = bar.add_task("training, epochs", total=None)
            model = demo.retrain(lambda p: bar.update(training, completed=p.epoch, total=p.epochs))
        else:
            model = demo.load()
        testing = bar.add_task("calibrating, then testing, sets", total=None)
        result = demo.run(
            model, correction, images=images, progress=lambda done, of: bar.update(testing, completed=done, total=of)
        )
    console.print(_table(result, correction))
    for line in _summary(result):
        console.print(line, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "demo.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("corruption", "severity", "images", "as_trained", "corrected"))
        writer.writerows((r.corruption, r.severity, result.images, r.plain, r.corrected) for r in result.rows)
    draw_demo(result, out / "demo.png")
    console.print(f"Files:  {out / 'demo.png'}, {out / 'demo.csv'}", highlight=False)


def _table(result: demo.Result, correction: Correction) -> Table:
    table = Table(
        title=f"ResNet-20 (batch norm) on handwritten digits, accuracy in %\n"
        f"as trained → corrected (step {correction.step:.2f}, location {correction.location!r})",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("corruption", no_wrap=True)
    for severity in demo.SEVERITIES:
        table.add_column(f"severity {severity}", justify="right", no_wrap=True)
    table.add_column("mean gain", justify="right", no_wrap=True)
    by_case = {(row.corruption, row.severity): row for row in result.corrupted}
    for name in demo.CORRUPTIONS:
        cells = [_change(by_case[name, severity]) for severity in demo.SEVERITIES]
        gain = _gain(result.mean(corruption=name))
        table.add_row(name.replace("_", " "), *cells, gain, end_section=name == demo.CORRUPTIONS[-1])
    means = [_change(result.mean(severity=severity)) for severity in demo.SEVERITIES]
    table.add_row("[bold]mean[/]", *means, _gain(result.mean()))
    table.add_row("clean", _change(result.clean), "", "", _gain(result.clean))
    return table


def _change(row: demo.Row) -> str:
    return _coloured(row, f"{row.plain:.1f} → {row.corrected:.1f}")


def _gain(row: demo.Row) -> str:
    return _coloured(row, f"{row.gain:+.1f}")


def _coloured(row: demo.Row, text: str) -> str:
    if abs(row.gain) < 0.05:
        return text
    return f"[{'green' if row.gain > 0 else 'red'}]{text}[/]"


def _summary(result: demo.Result) -> list[str]:
    rows = result.corrupted
    better, worse = sum(row.gain > 0 for row in rows), sum(row.gain < 0 for row in rows)
    mean = result.mean()
    sets = f"better in {better} of {len(rows)}, worse in {worse} (one image is {100 / result.images:.1f} points)"
    accuracy = f"{mean.plain:.1f} → {mean.corrected:.1f} ({mean.gain:+.1f}) under corruption"
    cost = f"{result.plain_ms:.1f} → {result.corrected_ms:.1f} ms an image"
    factor = result.corrected_ms / result.plain_ms
    return [
        f"Sets:   {sets}",
        f"Mean:   {accuracy}, {result.clean.gain:+.1f} on clean images",
        f"Time:   {cost} ({factor:.2g} times); calibration, once, {result.calibration_seconds:.0f} s",
    ]
