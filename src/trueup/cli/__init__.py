"""The command `trueup`: the library's own subcommands, and those that installed packages add.

A package adds subcommands with an entry point in the group `trueup.commands`: a function that takes the `typer.Typer`
application and registers them. Nothing here imports torch before a command runs.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    raise SystemExit(f"the command line needs {error.name}: pip install 'trueup[cli]'") from error

from trueup import __version__
from trueup.cli.faults import Guarded
from trueup.cli.report import report_command

GROUP = "trueup.commands"


def main() -> None:
    """Run the command line with the subcommands of every installed package."""
    prepare_process()
    app = application()
    for entry in entry_points(group=GROUP):
        try:
            entry.load()(app)
        except ImportError as error:
            typer.echo(f"the subcommands of {entry.value} are missing: {error}", err=True)
    app()


def application() -> typer.Typer:
    """Return the command line with the library's own subcommands."""
    app = typer.Typer(
        name="trueup",
        cls=Guarded,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_group)
    app.command("targets")(show_targets)
    app.command("report")(report_command)
    return app


def prepare_process() -> None:
    """Set what must be set before torch is imported, unless the user has set it."""
    # Waiting threads sleep instead of spinning. On busy cores, a spinning thread takes time from the one that it waits
    # for: with nine other jobs on two cores, twelve batches of 60 digits in a ResNet-20
    # took 29 and 55 s with spinning threads, 1.8 and 2.6 s with sleeping ones, and 5.4 and 6.1 s with one thread.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that has no λ gets a question mark, not a traceback


def _show_version(shown: bool) -> None:
    if shown:
        typer.echo(f"trueup {__version__}")
        raise typer.Exit


def _group(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error. TRUEUP_DEBUG=1 does the same.")
    ] = False,
) -> None:
    """Make trained networks robust at test time."""
    del version, debug  # `Guarded` looks for --debug anywhere in the command


def show_targets(path: Annotated[Path, typer.Argument(help="Targets file, as Targets.save writes it.")]) -> None:
    """Print what a targets file holds, and what calibration decided."""
    from trueup import Targets

    typer.echo(str(Targets.load(path)))
