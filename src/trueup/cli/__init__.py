"""The command `trueup`: the library's own subcommands, and those that installed packages add.

A package adds subcommands with an entry point in the group `trueup.commands`: a function that takes the `typer.Typer`
application and registers them.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    raise SystemExit(f"the command line needs {error.name}: pip install 'trueup[cli]'") from error

from trueup.cli.report import report

GROUP = "trueup.commands"

app = typer.Typer(
    name="trueup",
    help="Make trained networks robust at test time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line with the subcommands of every installed package."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()(app)
        except ImportError as error:
            typer.echo(f"the subcommands of {entry.value} are missing: {error}", err=True)
    app()


@app.callback()
def _group() -> None:
    pass


app.command()(report)


@app.command("targets")
def show_targets(path: Annotated[Path, typer.Argument(help="A file that Targets.save wrote.")]) -> None:
    """Print what a targets file holds, and what calibration decided."""
    from trueup import Targets

    try:
        typer.echo(str(Targets.load(path)))
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
