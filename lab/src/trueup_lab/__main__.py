"""`python -m trueup_lab`: the command `trueup` with the laboratory's subcommands, from a checkout that is not installed."""

from trueup.cli import app
from trueup_lab.cli import add_commands

if __name__ == "__main__":
    add_commands(app)
    app()
