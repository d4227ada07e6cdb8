"""The laboratory's subcommands of `trueup`, one file per command.

A command imports torch, and modules that need torch, inside its function: `trueup --help` must not wait for it.
"""

from __future__ import annotations

import typer

from trueup.cli.faults import Resumable
from trueup.cli.loading import LOADERS
from trueup_lab.cli.bench import bench_command
from trueup_lab.cli.corrupted_sets import make_set, show
from trueup_lab.cli.data import get
from trueup_lab.cli.demo import show_demo
from trueup_lab.cli.evaluate import evaluate_command
from trueup_lab.cli.export import export_command
from trueup_lab.cli.loading import load_by_name
from trueup_lab.cli.reproduce import reproduce_command
from trueup_lab.cli.train import train_command


def add_commands(app: typer.Typer) -> None:
    """Add the laboratory's subcommands to the command `trueup`, which finds this function as an entry point."""
    if load_by_name not in LOADERS:
        LOADERS.append(load_by_name)
    data = typer.Typer(help="Download, make and show data sets.", no_args_is_help=True)
    data.command(cls=Resumable)(get)
    data.command("make", cls=Resumable)(make_set)
    data.command()(show)
    app.add_typer(data, name="data")
    app.command("demo")(show_demo)
    app.command("train", cls=Resumable)(train_command)
    app.command("evaluate", cls=Resumable)(evaluate_command)
    app.command("reproduce", cls=Resumable)(reproduce_command)
    app.command("export")(export_command)
    app.command("bench")(bench_command)
