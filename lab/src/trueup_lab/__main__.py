"""`python -m trueup_lab`: the command `trueup` with the laboratory's subcommands, without installation."""

from trueup.cli import app
from trueup_lab.cli import add_commands

if __name__ == "__main__":
    add_commands(app)
    app()
