"""The command line, `trueup`: one file a command, put together here."""

from __future__ import annotations

try:
    import rich  # noqa: F401
    import typer
except ImportError as error:
    raise SystemExit(f"the command line needs {error.name}: pip install 'trueup[cli]'") from error

from trueup.cli.bench import bench
from trueup.cli.corrupted import make_set, show
from trueup.cli.data import get
from trueup.cli.demo import show_demo
from trueup.cli.evaluate import evaluate
from trueup.cli.export import export
from trueup.cli.reproduce import reproduce
from trueup.cli.train import train

app = typer.Typer(
    name="trueup",
    help="Make trained networks robust at test time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Get, make and look at data sets.", no_args_is_help=True)
app.add_typer(data, name="data")
app.command("demo")(show_demo)
data.command()(get)
data.command("make")(make_set)
data.command()(show)
app.command()(train)
app.command()(export)
app.command()(evaluate)
app.command()(reproduce)
app.command()(bench)


def main() -> None:
    """Run the command line."""
    app()
