"""The command line as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trueup_lab.cli import add_commands


@pytest.fixture(scope="session")
def call() -> Callable[..., Any]:
    """Call a subcommand of the laboratory: `call("evaluate", "resnet20-bn-digits", "--out", path)`."""
    app = typer.Typer(name="trueup", pretty_exceptions_enable=False)
    add_commands(app)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
