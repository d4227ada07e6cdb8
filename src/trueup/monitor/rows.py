"""One row per image in a CSV or Parquet file, for drift libraries and spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class ImageRow(NamedTuple):
    """One row: the results of one image."""

    time: float  # seconds since 1970
    p: float
    gate: float
    changed: bool | None  # None if not compared
    evidence: list[float | None]  # per norm; None if not finite


class RowWriter(Protocol):
    """A file that gets rows."""

    def write(self, rows: Sequence[ImageRow]) -> None:
        """Append rows."""

    def close(self) -> None:
        """Finish the file."""


def open_rows(path: str | PathLike[str], norms: Sequence[str]) -> RowWriter:
    """Open a file for rows, by its suffix. A CSV file that exists is continued; a Parquet file is written anew."""
    path = Path(path)
    names = ["timestamp", "p", "gate", "changed", *(f"evidence.{name}" for name in norms)]
    if path.suffix == ".csv":
        return CsvRows(path, names)
    if path.suffix == ".parquet":
        return ParquetRows(path, names)
    raise ValueError(f"rows={str(path)!r}: expected a path that ends in .csv or .parquet")


class CsvRows:
    """Rows as text. Times are in UTC, as ISO 8601; unknown values are empty cells."""

    def __init__(self, path: Path, names: list[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size:
            with path.open(encoding="utf-8", newline="") as file:
                found = next(csv.reader(file))
            if found != names:
                raise ValueError(f"{path} has the columns {found}, not {names}; name another file")
        self._file = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if not self._file.tell():
            self._writer.writerow(names)
            self._file.flush()

    def write(self, rows: Sequence[ImageRow]) -> None:
        """Append rows."""
        for row in rows:
            when = datetime.fromtimestamp(row.time, UTC).isoformat(timespec="milliseconds")
            numbers = ["" if x is None else f"{x:.6g}" for x in (row.p, row.gate, row.changed, *row.evidence)]
            self._writer.writerow([when, *numbers])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ParquetRows:
    """Rows as columns, one group of rows for each call of `write`."""

    def __init__(self, path: Path, names: list[str]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError("Parquet files need pyarrow: pip install 'trueup[parquet]'; or name a .csv") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        types = {"timestamp": pyarrow.timestamp("ms", tz="UTC"), "changed": pyarrow.bool_()}
        self._schema = pyarrow.schema([(name, types.get(name, pyarrow.float64())) for name in names])
        self._table: Any = pyarrow.table
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema)

    def write(self, rows: Sequence[ImageRow]) -> None:
        """Append rows."""
        listed = [(datetime.fromtimestamp(row.time, UTC), row.p, row.gate, row.changed, *row.evidence) for row in rows]
        columns = dict(zip(self._schema.names, map(list, zip(*listed, strict=True)), strict=True))
        self._writer.write_table(self._table(columns, schema=self._schema))

    def close(self) -> None:
        """Write the end of the file, without which it cannot be read."""
        self._writer.close()
