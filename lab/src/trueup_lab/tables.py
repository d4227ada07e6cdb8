"""CSV files whose rows are instances of a dataclass.

The fields of the dataclass are the columns, in order. Values are read back in the field's type (`str`, `int`, `float`,
`bool`, or one of these or None; None is an empty cell). Use `read_table` to read, `start_table` and then `append_rows`
to add rows as they are measured, and `write_table` to replace a whole file.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from trueup.atomic import write_atomically

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


def number(format_spec: str) -> Any:
    r"""Declare a dataclass field that is written in the given format.

    >>> @dataclasses.dataclass
    ... class Point:
    ...     name: str
    ...     share: float = number(".2f")
    >>> as_text([Point("a", 0.5)])
    'a,0.50\n'
    """
    return dataclasses.field(metadata={"format": format_spec})


def read_table(path: str | os.PathLike[str], kind: type[R]) -> list[R]:
    """Return the rows of a file, or no rows if it does not exist. An incomplete last line is skipped."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text().splitlines(keepends=True)
    reader = csv.reader(lines if not lines or lines[-1].endswith("\n") else lines[:-1])
    header = next(reader, list(columns(kind)))
    if tuple(header) != columns(kind):
        raise ValueError(
            f"{path} does not hold rows of {kind.__name__}: its columns are {', '.join(header)}, expected "
            f"{', '.join(columns(kind))}; give another file"
        )
    types = get_type_hints(kind)
    return [
        kind(**{name: _parse(text, types[name]) for name, text in zip(columns(kind), line, strict=True)})
        for line in reader
    ]


def start_table(path: str | os.PathLike[str], kind: type[R]) -> list[R]:
    """Make a file ready for `append_rows` and return its rows.

    A new file gets its header; an incomplete last line, left by a killed process, is removed. Where several processes
    share the file, only one may call this, before any of them appends.
    """
    path = Path(path)
    rows = read_table(path, kind)  # refuses a foreign file before anything is written to it
    content = path.read_bytes() if path.exists() else b""
    complete = content[: content.rfind(b"\n") + 1]
    if not complete:
        write_table(path, kind, [])
    elif complete != content:
        os.truncate(path, len(complete))
    return rows


def append_rows(path: str | os.PathLike[str], rows: Iterable[DataclassInstance]) -> None:
    """Add rows to a file that `start_table` prepared, in one write, so that processes can share the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, as_text(rows).encode())
    finally:
        os.close(descriptor)


def write_table(path: str | os.PathLike[str], kind: type[R], rows: Iterable[R]) -> None:
    """Replace a file by these rows. A crash leaves either the old file or the new one."""
    write_atomically(Path(path), (",".join(columns(kind)) + "\n" + as_text(rows)).encode())


def columns(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """Return the names of the columns."""
    return tuple(field.name for field in dataclasses.fields(kind))


def as_text(rows: Iterable[DataclassInstance]) -> str:
    """Return the rows as lines of CSV, without a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([_cell(getattr(row, field.name), field) for field in dataclasses.fields(row)])
    return text.getvalue()


def _cell(value: Any, field: dataclasses.Field[Any]) -> Any:
    spec = field.metadata.get("format")
    return value if value is None or spec is None else format(value, spec)


def _parse(text: str, type_: Any) -> Any:
    options = get_args(type_) or (type_,)
    if NoneType in options and not text:
        return None
    (plain,) = (option for option in options if option is not NoneType)
    return text == "True" if plain is bool else plain(text)
