"""`trueup bench`: measure the cost of the correction."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from trueup_lab.performance import PerformanceCase, TimingRow


def bench_command(
    only: Annotated[list[str] | None, typer.Argument(help="Only cases whose names contain one of these.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... (default: a GPU if there is one).")] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file (default: results/performance_<device>.csv).")] = None,
    missing: Annotated[bool, typer.Option(help="Only cases without rows in the file.")] = False,
    limit: Annotated[
        float, typer.Option(help="Stop after this many seconds; rows measured by then are kept.")
    ] = math.inf,
    together: Annotated[
        int, typer.Option(help="Number of cases that are compiled at a time, each in a process of its own.")
    ] = 1,
    figure: Annotated[Path | None, typer.Option(help="File for a figure of cost over number of activations.")] = None,
) -> None:
    """Measure the cost of the correction, as a multiple of the cost without it.

    New rows replace the file's rows of the same cases; other rows stay. The most important cases come first, so a run
    with --limit can be continued with --missing.
    """
    import torch

    from trueup_lab.devices import device_name, find_device
    from trueup_lab.performance import CASES, read_timings, write_timings
    from trueup_lab.performance.memory import keep_freed_memory
    from trueup_lab.performance.rows import measured_on

    place = torch.device(find_device(device))
    if place.type == "cpu":
        keep_freed_memory()
    name = device_name(place).lower().replace("nvidia ", "").replace(" ", "_")
    path = out or Path("results") / f"performance_{name}.csv"
    chosen = [case for case in CASES if case.needs in ("", place.type)]
    chosen = [case for case in chosen if not only or any(part.lower() in case.name.lower() for part in only)]
    if not chosen:
        words = dict.fromkeys(word for case in CASES for word in re.split("[,:] ", case.name))
        raise ValueError(
            f"no case for {place} has a name like {', '.join(only or ())}; names are made of {', '.join(words)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=path.parent):  # whether it can be written is known before the work, not after it
        pass
    if missing:
        done = {row.case for row in read_timings(path)}
        chosen = [case for case in chosen if case.name not in done]
    console = Console()
    with _time_limit(limit) as ends:
        for case, found in _outcomes(chosen, place, together, console):
            if isinstance(found, ImportError):  # torchvision has most architectures, and not every machine has it
                console.print(f"{case.name}: skipped, {found}")
            elif isinstance(found, Exception):
                if limit == math.inf:
                    raise found
                console.print(f"{case.name}: failed, {type(found).__name__}: {found}")  # the others are wanted
            else:
                rows = [measured_on(place, row) for row in found]
                write_timings(path, rows)
                console.print(_table(rows))
    if ends:
        typer.echo(f"stopped after {limit:g} seconds; run it again with --missing for the rest")
    if figure is not None:
        from trueup_lab.figures import draw_scaling

        typer.echo(f"{draw_scaling(read_timings(path), figure)} drawn")
    typer.echo(f"{path} written")


def _outcomes(
    cases: list[PerformanceCase], device: torch.device, together: int, console: Console
) -> Iterator[tuple[PerformanceCase, list[TimingRow] | Exception]]:
    """Measure the cases in their order: the rows of each, or what went wrong."""
    from trueup_lab.performance.together import measure_together

    for several, group in itertools.groupby(cases, lambda case: case.compiles and together > 1):
        if several:
            with console.status("compiling"):
                yield from measure_together(list(group), device, together)
            continue
        for case in group:
            with console.status(case.name):
                try:
                    found: list[TimingRow] | Exception = list(case.prepare(device)())
                except Exception as error:
                    found = error
            yield case, found


class _OutOfTime(BaseException):
    """The time limit has passed. Not an Exception, because libraries may catch those."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[list[float]]:
    """End the block after so many seconds, even in a wait for another process. The list is then not empty."""
    ended: list[float] = []
    if seconds == math.inf:
        yield ended
        return

    def end(*_: object) -> None:
        ended.append(seconds)
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield ended
    except _OutOfTime:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _table(rows: list[TimingRow]) -> Table:
    table = Table(title=rows[0].case, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("what", "against", "rows", "cost", "of", "ratio", "to reach"):
        left = column in ("what", "against")
        table.add_column(column, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for row in rows:
        met = "" if row.reach is None else f"<= {row.reach:g}" + ("" if row.ratio <= row.reach else "  missed")
        costs = (_cost(row.cost, row), _cost(row.of, row), f"{row.ratio:.2f}", met)
        rows_of = f"{row.batch} x {row.activations}" if row.activations else str(row.batch)
        table.add_row(row.what, row.against, rows_of, *costs)
    return table


def _cost(cost: float, row: TimingRow) -> str:
    return f"{cost:g}" if row.against == "kernel" else _readable(cost)


def _readable(cost: float) -> str:
    """Format seconds or bytes in a suitable unit.

    >>> _readable(0.0123), _readable(4e-6), _readable(3e9)
    ('12.3 ms', '4 us', '3 GB')
    """
    for unit, size in (("GB", 1e9), ("s", 1.0), ("ms", 1e-3)):
        if cost >= size and (unit == "GB" or cost < 1e6):
            return f"{cost / size:.3g} {unit}"
    return f"{cost / 1e-6:.3g} us" if cost < 1 else f"{cost / 1e6:.3g} MB"
