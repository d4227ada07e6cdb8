"""`trueup demo`: both rules on corrupted digits, or the default rule on street scenes in bad weather."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trueup_lab.cli.demo_scenes import show_scenes

DIGITS, SCENES = 120, 24
"""Images per test set."""
TEST = 360
"""Number of test digits, as in trueup_lab.data.digits, which is not imported before the command runs."""


def show_demo(
    retrain: Annotated[bool, typer.Option(help="Train the network from scratch first (a minute or two).")] = False,
    lambda1: Annotated[float, typer.Option(help="λ1, weight of the training distribution.")] = 0.75,
    lambda2: Annotated[float, typer.Option(help="λ2, weight of the image's own activations.")] = 0.25,
    iterations: Annotated[int, typer.Option(help="Number of iterations.")] = 2,
    location: Annotated[str, typer.Option(help="keep (the layer's own mean) or match (the training mean).")] = "keep",
    images: Annotated[
        int | None, typer.Option(help="Images per test set. [120 digits, 24 scenes]", min=1, max=TEST)
    ] = None,
    task: Annotated[
        str, typer.Option(help="classification (digits) or segmentation (street scenes).")
    ] = "classification",
    out: Annotated[Path, typer.Option(help="Folder for the figure and the CSV file.")] = Path("demo"),
) -> None:
    """Show trueup on corrupted digits, or on street scenes in bad weather (--task segmentation), in about a minute.

    On digits, compares three networks under nine corruptions: as trained, with the paper's correction (set by
    --lambda1, --lambda2, --iterations and --location), and with evidence, the default rule. On street scenes, compares
    the network as trained and with the default rule in fog, dusk, rain and noise; of the options, only --images and
    --out apply there.
    """
    from trueup import Correction
    from trueup_lab import demo
    from trueup_lab.cli.demo_tables import DemoTableRow, demo_summary, demo_table
    from trueup_lab.figures import draw_demo
    from trueup_lab.figures.style import pyplot
    from trueup_lab.tables import write_table

    if task not in ("classification", "segmentation"):
        raise typer.BadParameter(f"--task {task}: expected classification or segmentation")
    correction = Correction(lambda1, lambda2, iterations, location)  # type: ignore[arg-type]
    pyplot()  # a missing package is reported before the work, not after it
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=out):
        pass
    if task == "segmentation":
        show_scenes(images or SCENES, out)
        return
    images = images or DIGITS
    console = Console()

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
    console.print(demo_table(result, correction))
    for line in demo_summary(result):
        console.print(line, highlight=False)
    lines = [DemoTableRow(row.corruption, row.severity, result.images, **row.accuracy) for row in result.rows]
    write_table(out / "demo.csv", DemoTableRow, lines)
    draw_demo(result, out / "demo.png")
    console.print(f"Numbers: {out / 'demo.csv'}", highlight=False, soft_wrap=True)
    console.print(
        f"Open {out / 'demo.png'} to see the digits and what each rule gains", highlight=False, soft_wrap=True
    )
