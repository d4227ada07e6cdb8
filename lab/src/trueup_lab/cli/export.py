"""`trueup export`: turn training runs into model files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished training runs.")],
    models: Annotated[Path | None, typer.Option(help="Folder for files that hold all seeds.")] = None,
    zoo: Annotated[Path | None, typer.Option(help="Folder for files that hold one seed.")] = None,
    table: Annotated[Path | None, typer.Option(help="CSV file of accuracies, beside the paper's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed for --zoo (default: the one with the median accuracy).")
    ] = None,
) -> None:
    """Turn training runs into model files (float16) and a table of accuracies."""
    from trueup_lab.training.export import export, gather

    if models is None and zoo is None and table is None:
        raise ValueError("nothing to write: give --models, --zoo or --table")
    if seed is not None and zoo is None:
        raise ValueError(f"--seed {seed} chooses the model for --zoo, which is not given; leave it out")
    written = export(gather(runs), models=models, zoo=zoo, table=table, seed=seed)
    for path in written:
        typer.echo(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
