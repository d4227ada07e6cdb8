"""`trueup demo --task segmentation`: drawn street scenes in fog, dusk, rain and noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from trueup_lab.demo.scenes import ScenesResult


def show_scenes(scenes: int, out: Path) -> None:
    """Run the demonstration, print its table, and write the picture and the CSV file."""
    from trueup_lab.demo.scenes import ScenesRow, load_scenes_model, run_scenes
    from trueup_lab.figures.scenes import draw_scenes_demo
    from trueup_lab.figures.style import pyplot
    from trueup_lab.tables import write_table

    pyplot()  # a missing package is reported before the work, not after it
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        testing = bar.add_task("calibrating, then testing, sets", total=None)
        result = run_scenes(
            load_scenes_model(),
            scenes=scenes,
            progress=lambda done, of: bar.update(testing, completed=done, total=of),
        )
    console.print(scenes_table(result))
    console.print(str(result.targets), highlight=False)
    console.print("An answer is the class of a pixel: the shares above are shares of pixels", highlight=False)
    plain, corrected = result.ms
    console.print(
        f"A scene takes {plain:.1f} ms as trained and {corrected:.1f} ms corrected; calibration takes "
        f"{result.calibration_seconds:.0f} s, once",
        highlight=False,
    )
    write_table(out / "segmentation.csv", ScenesRow, result.rows)
    draw_scenes_demo(result.examples, out / "segmentation.png")
    console.print(f"Numbers: {out / 'segmentation.csv'}", highlight=False, soft_wrap=True)
    console.print(f"Open {out / 'segmentation.png'} to see scenes and answers", highlight=False, soft_wrap=True)


def scenes_table(result: ScenesResult) -> Table:
    """One line per test set: mean IoU as trained and corrected."""
    table = Table(
        title=f"A U-Net on drawn street scenes, {result.rows[0].scenes} per line: mean IoU in %",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("weather", no_wrap=True)
    table.add_column("severity", justify="right")
    for name in ("as trained", "with trueup", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(result.rows):
        last = number + 1 == len(result.rows) or result.rows[number + 1].weather != row.weather
        _add(table, row.weather, str(row.severity or ""), row.as_trained, row.corrected, last=last)
    _add(table, "[bold]mean[/]", "", *result.mean())
    return table


def _add(table: Table, name: str, severity: str, before: float, after: float, *, last: bool = False) -> None:
    gain = after - before
    colour = "green" if gain > 0.05 else "red" if gain < -0.05 else "default"
    table.add_row(name, severity, f"{before:.1f}", f"{after:.1f}", f"[{colour}]{gain:+.1f}[/]", end_section=last)
