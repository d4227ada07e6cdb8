"""A measurement as a row of a file, with what it was made on."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from trueup.atomic import write_atomically


@dataclass(frozen=True)
class Row:
    """How much one thing costs, as a multiple of another. Times are medians in seconds; memory is in bytes."""

    case: str  # which of `CASES`
    what: str
    against: str
    activations: int  # an image or row, where that is what varies; else 0
    batch: int
    cost: float
    of: float  # what `against` costs
    ratio: float
    reach: float | None  # what the ratio is to be at most
    device: str = ""
    threads: int = 0
    python: str = ""
    torch: str = ""
    triton: str = ""
    numba: str = ""


def measured_on(device: torch.device, row: Row) -> Row:
    """The same, saying where it was measured."""
    return Row(**{**asdict(row), **_place(device)})


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Put rows into a file in the place of those of the same cases."""
    rows = list(rows)
    kept = [row for row in read_rows(path) if row.case not in {new.case for new in rows}]
    file = io.StringIO()
    writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    for row in (*kept, *rows):
        values = asdict(row)
        for name in ("cost", "of", "ratio"):
            values[name] = f"{values[name]:.4g}"
        writer.writerow({name: "" if value is None else value for name, value in values.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, file.getvalue().encode())


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote; nothing if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_read(values) for values in csv.DictReader(file)]


def _read(values: dict[str, str]) -> Row:
    numbers = {name: int(values[name]) for name in ("activations", "batch", "threads")}
    ratios = {name: float(values[name]) for name in ("cost", "of", "ratio")}
    reach = float(values["reach"]) if values["reach"] else None
    return Row(**{**values, **numbers, **ratios, "reach": reach})  # type: ignore[arg-type]


def _place(device: torch.device) -> dict[str, str | int]:
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "numba": _version("numba"),
    }


def device_name(device: torch.device) -> str:
    """What a person would call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
