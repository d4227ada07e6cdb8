"""`trueup data get`: download data sets."""

from __future__ import annotations

from typing import Annotated

import typer

from trueup_lab.cli.options import DataRootOption


def get(
    names: Annotated[list[str], typer.Argument(help="mnist, cifar10, mnist-c, cifar10-c or imagenet-c.")],
    data: DataRootOption = None,
) -> None:
    """Download published data sets. Existing files are kept, and interrupted downloads resume."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from trueup_lab.data.download import REMOTES
    from trueup_lab.data.download import get as fetch_set

    if unknown := [name for name in names if name not in REMOTES]:
        raise ValueError(f"unknown data set {unknown[0]!r}; known: {', '.join(REMOTES)}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        tasks = {}

        def report(file: str, here: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file)
            progress.update(tasks[file], completed=here, total=total)

        for name in names:
            paths = fetch_set(name, data, report=report)
            progress.console.print(f"{name} is at {paths[0].parent}", soft_wrap=True)
