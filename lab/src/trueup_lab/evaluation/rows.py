"""Rows: one number measured and all that made it, in a CSV that only ever grows."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints


@dataclass(frozen=True)
class Row:
    """One model, method and test set.

    `stream` is `any` and `batch` 0 for stateless methods, whose numbers are the same in all. For a method whose memory
    lasts from set to set, `stream` also names the sequence of sets, in four digits. `calibrated` is 0 for methods
    without targets.
    """

    model: str
    seed: int  # of the model
    method: str
    stream: str
    batch: int
    corruption: str
    severity: int
    images: int
    accuracy: float  # in percent
    calibration_error: float  # in percent, 15 bins
    ms: float  # an image
    data: str  # clean, published or generated
    data_seed: int
    calibrated: int  # on so many clean images
    needs: str
    checkpoint: str  # SHA-256 of the model's file, first digits
    trueup: str
    torch: str
    device: str

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two rows the same measurement: everything but the results, the versions and the device."""
        return (
            self.model, self.seed, self.method, self.stream, self.batch, self.corruption, self.severity, self.images,
            self.data, self.data_seed, self.calibrated, self.checkpoint,
        )  # fmt: skip


FIELDS = tuple(field.name for field in dataclasses.fields(Row))


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a file; none where it is not there. A last line that a kill cut short is left out."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text().splitlines(keepends=True)
    whole = lines if not lines or lines[-1].endswith("\n") else lines[:-1]
    reader = csv.reader(whole)
    header = next(reader, list(FIELDS))
    if tuple(header) != FIELDS:
        raise ValueError(f"{path} is no file of results of this version: its columns are {', '.join(header)}")
    types = get_type_hints(Row)
    return [Row(*(types[name](value) for name, value in zip(FIELDS, line, strict=True))) for line in reader]


def append_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Add rows to a file in one write, so that processes may share it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(dataclasses.astuple(row) for row in rows)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, text.getvalue().encode())
    finally:
        os.close(descriptor)


def begin(path: str | os.PathLike[str]) -> None:
    """Make a file ready for appending: its header is there, and its last line is whole. For one process only."""
    path = Path(path)
    read_rows(path)  # refuses what is not ours before anything is written to it
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if not whole:
        path.write_text(",".join(FIELDS) + "\n")
    elif whole != content:
        os.truncate(path, len(whole))
