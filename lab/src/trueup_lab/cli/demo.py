"""`trueup demo`: both rules on corrupted digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trueup import Correction
from trueup_lab import demo
from trueup_lab.cli.demo_scenes import show_scenes
from trueup_lab.data import digits
from trueup_lab.figures import draw_demo
from trueup_lab.tables import write_table

PAPER = demo.PAPERS_MNIST
DIGITS, SCENES = 120, 24
"""Images per test set."""


@dataclass(frozen=True)
class DemoTableRow:
    """One test set in the CSV file: accuracies in percent."""

    corruption: str
    severity: int
    images: int
    as_trained: float
    correction: float
    evidence: float


def show_demo(
    retrain: Annotated[bool, typer.Option(help="Train the network from scratch first (a minute or two).")] = False,
    lambda1: Annotated[float, typer.Option(help="λ1, weight of the training distribution.")] = PAPER.lambda1,
    lambda2: Annotated[float, typer.Option(help="λ2, weight of the image's own activations.")] = PAPER.lambda2,
    iterations: Annotated[int, typer.Option(help="Number of iterations.")] = PAPER.iterations,
    location: Annotated[str, typer.Option(help="keep the layer's mean, or match that of training.")] = PAPER.location,
    images: Annotated[
        int | None, typer.Option(help="Images per test set. [120 digits, 24 scenes]", min=1, max=digits.TEST)
    ] = None,
    task: Annotated[
        str, typer.Option(help="classification (digits) or segmentation (street scenes).")
    ] = "classification",
    out: Annotated[Path, typer.Option(help="Folder for the figure and the CSV file.")] = Path("demo"),
) -> None:
    """Show both rules on digits under nine corruptions. Takes less than a minute on two cores.

    Compares the network as trained, with the paper's correction (set by the λs, iterations and location), and with
    evidence, the default. With --task segmentation, shows the default on street scenes in fog, dusk, rain and noise;
    the other options are for digits.
    """
    if task not in ("classification", "segmentation"):
        raise typer.BadParameter(f"--task {task}: expected classification or segmentation")
    if task == "segmentation":
        show_scenes(images or SCENES, out)
        return
    images = images or DIGITS
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
    lines = [DemoTableRow(row.corruption, row.severity, result.images, **row.accuracy) for row in result.rows]
    write_table(out / "demo.csv", DemoTableRow, lines)
    draw_demo(result, out / "demo.png")
    console.print(f"Files:  {out / 'demo.png'}, {out / 'demo.csv'}", highlight=False)


def _table(result: demo.Result, correction: Correction) -> Table:
    table = Table(
        title="ResNet-20 on digits: accuracy in %, mean over severities\n"
        f"correction: the paper's, step {correction.step:.2f}, location {correction.location!r}\n"
        "evidence: trueup's own, the default",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("corruption", no_wrap=True)
    for name in (demo.PLAIN, *demo.RULES):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for name in demo.CORRUPTIONS:
        _add(table, name.replace("_", " "), result.mean(corruption=name), last=name == demo.CORRUPTIONS[-1])
    for severity in demo.SEVERITIES:
        _add(table, f"severity {severity}", result.mean(severity=severity), last=severity == demo.SEVERITIES[-1])
    _add(table, "[bold]mean[/]", result.mean())
    _add(table, "clean", result.clean)
    return table


def _add(table: Table, name: str, row: demo.DemoRow, *, last: bool = False) -> None:
    cells = [f"{row.accuracy[rule]:.1f}  {_coloured(row.gain(rule))}" for rule in demo.RULES]
    table.add_row(name, f"{row.accuracy[demo.PLAIN]:.1f}", *cells, end_section=last)


def _coloured(gain: float) -> str:
    text = f"{gain:+5.1f}"
    if abs(gain) < 0.05:
        return text
    return f"[{'green' if gain > 0 else 'red'}]{text}[/]"


def _summary(result: demo.Result) -> list[str]:
    mean, clean, plain = result.mean(), result.clean, result.ms[demo.PLAIN]
    lines = []
    for rule in demo.RULES:
        gains = [row.gain(rule) for row in result.corrupted]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        sets = f"better in {better} of {len(gains)} sets, worse in {worse}"
        points = f"{mean.gain(rule):+.1f} points under corruption, {clean.gain(rule):+.1f} on clean images"
        lines.append(f"{rule}: {sets}; {points}; {result.ms[rule] / plain:.2g} times the time")
    one = f"One image is {100 / result.images:.1f} points and takes {plain:.1f} ms as trained"
    return [*lines, f"{one}; calibration takes {result.calibration_seconds:.0f} s, once"]
