"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataRootOption = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the data sets (default: $TRUEUP_DATA, else the user cache)."),
]
