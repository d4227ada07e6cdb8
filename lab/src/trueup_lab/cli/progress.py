"""Progress of long runs: a bar with the time left, or plain lines if the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from trueup_lab.durations import duration

if TYPE_CHECKING:
    from trueup_lab.evaluation import EvaluationProgress

EVERY = 20.0  # seconds between lines


@contextmanager
def passes(*, quiet: bool = False) -> Iterator[Callable[[EvaluationProgress], None]]:
    """Yield the function that the runner reports its progress to."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        last = float("-inf")  # time of the last line; the first comes at once

        def line(progress: EvaluationProgress) -> None:
            nonlocal last
            if not quiet and (time.monotonic() - last > EVERY or progress.done == progress.total):
                last = time.monotonic()
                left = f"  {duration(progress.left)} left" if progress.done else ""
                typer.echo(f"{progress.done}/{progress.total}{left}  {progress.what}", err=True)

        yield line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading, calibrating", total=None)

        def move(progress: EvaluationProgress) -> None:
            text = f"{duration(progress.left)} left  {progress.what}" if progress.done else progress.what
            bar.update(task, completed=progress.done, total=progress.total, description=text)

        yield move
