"""One measured cost, relative to another, as a row of a CSV file."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trueup_lab.devices import device_name
from trueup_lab.locks import locked
from trueup_lab.tables import number, read_table, write_table


@dataclass(frozen=True)
class TimingRow:
    """The cost of `what` as a multiple of the cost of `against`: median times in seconds, memory in bytes, or a count.

    Where `against` is "second", "megabyte" or "kernel", the cost is compared with that unit.
    """

    case: str  # name of the case in `CASES`
    what: str
    against: str
    activations: int  # per image or row, where that varies; otherwise 0
    batch: int
    cost: float = number(".4g")
    of: float = number(".4g")  # the cost of `against`
    ratio: float = number(".4g")
    reach: float | None = None  # upper bound that the ratio should meet
    device: str = ""
    threads: int = 0
    python: str = ""
    torch: str = ""
    triton: str = ""
    numba: str = ""


def compared(
    case: str,
    what: str,
    against: str,
    costs: Mapping[str, float],
    reach: float | None,
    *,
    activations: int = 0,
    batch: int = 0,
) -> TimingRow:
    """A row for the cost of `what` as a multiple of that of `against`."""
    ratio = costs[what] / costs[against]
    return TimingRow(case, what, against, activations, batch, costs[what], costs[against], ratio, reach)


def absolute(
    case: str, what: str, unit_name: str, cost: float, reach: float | None, *, unit: float = 1.0, batch: int = 0
) -> TimingRow:
    """A row for an absolute cost, relative to a unit: one second, one megabyte, one kernel."""
    return TimingRow(case, what, unit_name, 0, batch, cost, unit, cost / unit, reach)


def measured_on(device: torch.device, row: TimingRow) -> TimingRow:
    """Return the row with the device and the versions filled in."""
    return replace(
        row,
        device=device_name(device),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        numba=_version("numba"),
    )


def write_timings(path: Path, rows: Iterable[TimingRow]) -> None:
    """Write rows to a file, in place of its rows of the same cases."""
    rows = list(rows)
    with locked(path):  # another process may add its rows at the same time
        kept = [row for row in read_timings(path) if row.case not in {new.case for new in rows}]
        write_table(path, TimingRow, [*kept, *rows])


def read_timings(path: Path) -> list[TimingRow]:
    """Return the rows of a file, or no rows if it does not exist."""
    return read_table(path, TimingRow)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
