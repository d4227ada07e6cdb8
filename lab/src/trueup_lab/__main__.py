"""`python -m trueup_lab`: the command `trueup` with the laboratory's subcommands, without installation."""

from trueup.cli import application, prepare_process
from trueup_lab.cli import add_commands

if __name__ == "__main__":
    prepare_process()
    app = application()
    add_commands(app)
    app()
