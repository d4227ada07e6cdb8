"""`trueup reproduce`: measure and draw the tables and figures of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from trueup_lab.cli.options import DataRootOption
from trueup_lab.cli.progress import passes
from trueup_lab.cli.train import check_limit, parse_seeds


def reproduce_command(
    names: Annotated[list[str] | None, typer.Argument(help="Names of tables and figures; see --list.")] = None,
    every: Annotated[
        bool, typer.Option("--list", help="List every table and figure, and the models that it still needs.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--report", help="Write the document that compares our results with the paper's.")
    ] = False,
    results: Annotated[Path, typer.Option(help="Folder of models, rows and pictures.")] = Path("results"),
    document: Annotated[Path, typer.Option(help="File that --report writes.")] = Path("docs/reproduction.md"),
    data: DataRootOption = None,
    images: Annotated[int | None, typer.Option(help="Images per test set (default: all).", min=1)] = None,
    calibrate: Annotated[int | None, typer.Option(help="Clean images for calibration (default: all).", min=1)] = None,
    seeds: Annotated[str | None, typer.Option(help="Only these models, such as 0-9 or 0,3.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... (default: a GPU if there is one).")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop cleanly within this many seconds.", min=0)] = None,
    targets: Annotated[Path, typer.Option(help="Folder where targets are kept for the next run.")] = Path(
        "runs/targets"
    ),
) -> None:
    """Measure and draw the paper's tables and figures. After an interruption, run the same command again to
    continue.

    Rows are stored in RESULTS/<set>-c.csv, pictures in RESULTS/figures. Also runs under torchrun.
    """
    import time

    from trueup.atomic import write_atomically
    from trueup_lab.experiments import experiment, lacking, run_experiment
    from trueup_lab.experiments.document import report
    from trueup_lab.figures import draw
    from trueup_lab.processes import own_device, together

    began = time.monotonic()
    check_limit(time_limit)
    if every or not (names or write):
        Console().print(_list(results, data))
        return
    chosen = [experiment(name) for name in names or ()]
    with together() as processes, passes(quiet=processes.rank > 0) as tell:
        first = processes.rank == 0
        for one in chosen:
            without = lacking(one, results, data)
            for source in without if first else ():
                typer.echo(f"{one.name}: {source.missing(results, data)}", err=True)
            finished = run_experiment(
                one,
                results,
                root=data,
                device=own_device(device),
                images=images,
                calibrate=calibrate,
                seeds=None if seeds is None else parse_seeds(seeds),
                targets=targets,
                time_limit=None if time_limit is None else time_limit - (time.monotonic() - began),
                processes=processes,
                report=tell,
            )
            if not finished:
                if first:
                    typer.echo(f"{one.name}: stopped at the time limit; run the same command again to continue")
                return
            if first:
                for path in draw(one, results, root=data, images=images):
                    typer.echo(f"{one.name}: {path}")
                typer.echo(f"{one.name}: done" + (", for the models that were found" if without else ""))
        if write and first:
            write_atomically(document, report(results, data).encode())
            typer.echo(f"{document} written")


def _list(results: Path, data: Path | None) -> Group:
    """Return a table of experiments with their missing models, and how to get each model."""
    from trueup_lab.experiments import EXPERIMENTS, lacking

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "what", "missing models"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    ways: dict[str, str] = {}
    for one in EXPERIMENTS:
        without = lacking(one, results, data)
        ways |= {source.model: source.missing(results, data) for source in without}
        table.add_row(one.name, one.title, ", ".join(source.model for source in without) or "none")
    return Group(table, *(Text(f"{way}\n") for way in ways.values()))
