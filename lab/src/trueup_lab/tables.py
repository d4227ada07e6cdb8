"""CSV files whose rows are instances of a dataclass.

The fields of the dataclass are the columns, in order. Values are read back in the field's type (`str`, `int`, `float`,
`bool`, or one of these or None; None is an empty cell). Use `read_table` to read, `start_table` and then `append_rows`
to add rows as they are measured, and `write_table` to replace a whole file. `read_dicts` reads any file as text.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import warnings
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from trueup.atomic import write_atomically
from trueup_lab.locks import locked

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
    """Return the rows of a file, or no rows if it does not exist. An incomplete last line is skipped.

    Any other damaged line is an error that names it.
    """
    content = Path(path).read_bytes() if Path(path).exists() else b""
    return _rows(path, kind, _complete(content))


def read_dicts(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Return the rows of any CSV file with a header, as text by column."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def start_table(path: str | os.PathLike[str], kind: type[R]) -> list[R]:
    """Make a file ready for `append_rows` and return its rows.

    A new file gets its header. A damaged last line, left by a killed process or a full disk, is removed with a warning.
    """
    path = Path(path)
    with locked(path):
        content = path.read_bytes() if path.exists() else b""
        complete = _complete(content)
        try:
            rows = _rows(path, kind, complete)  # refuses a foreign file before anything is written to it
        except _DamagedLineError as error:
            if not error.last:
                raise
            complete = complete[: complete.rstrip(b"\n").rfind(b"\n") + 1]
            rows = _rows(path, kind, complete)
        if not complete:
            write_table(path, kind, [])
        elif complete != content:
            os.truncate(path, len(complete))
            warnings.warn(
                f"{path}: the last line was damaged, probably by a killed process or a full disk. It was removed, and "
                f"{len(rows)} rows are left; the lost row will be measured again",
                stacklevel=2,
            )
    return rows


def append_rows(
    path: str | os.PathLike[str],
    rows: Iterable[R],
    *,
    key: Callable[[R], Hashable] | None = None,
) -> list[R]:
    """Add rows to a file that `start_table` prepared: all of them, or none and an error. Return the added rows.

    Processes can share the file. With a `key`, a row is left out if another process has added one with the same key.
    Pass the same function each time: the keys that were read are remembered per function.
    """
    rows = list(rows)
    if not rows:
        return []
    path = Path(path)
    with locked(path), path.open("r+b", buffering=0) as file:
        complete = _complete(path.read_bytes())
        if key is not None:
            there = _keys(path, os.fstat(file.fileno()).st_ino, complete, type(rows[0]), key)
            rows = [row for row in rows if key(row) not in there]
        file.truncate(len(complete))  # drops half a line that a killed process left
        file.seek(len(complete))
        left = memoryview(as_text(rows).encode())
        try:
            while left:  # a nearly full disk writes a part, and fails only at the next write
                left = left[file.write(left) :]
        except OSError:
            file.truncate(len(complete))
            raise
    return rows


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


_READ: dict[tuple[Path, Any], tuple[int, int, set[Hashable]]] = {}  # file number, bytes read, keys found in them


def _keys(path: Path, number: int, content: bytes, kind: type[R], key: Callable[[R], Hashable]) -> set[Hashable]:
    """Return the keys of a file's rows. Only rows added since the last call are read."""
    known, size, keys = _READ.get((path, key), (number, 0, set[Hashable]()))
    if known != number or size > len(content):  # another file
        size, keys = 0, set()
    header = content[: content.find(b"\n") + 1]
    keys |= {key(row) for row in _rows(path, kind, header + content[max(size, len(header)) :])}
    _READ[path, key] = number, len(content), keys
    return keys


class _DamagedLineError(ValueError):
    """A damaged line. `last` tells whether it is the file's last line."""

    def __init__(self, message: str, *, last: bool) -> None:
        super().__init__(message)
        self.last = last


def _complete(content: bytes) -> bytes:
    """Return the complete lines of a file."""
    return content[: content.rfind(b"\n") + 1]


def _rows(path: str | os.PathLike[str], kind: type[R], content: bytes) -> list[R]:
    lines = content.decode("utf-8", "replace").split("\n")[:-1]
    if not lines:
        return []
    reader = csv.reader(line + "\n" for line in lines)
    header = next(reader)
    if tuple(header) != columns(kind):
        raise ValueError(
            f"{os.fspath(path)} does not hold rows of {kind.__name__}: its columns are {', '.join(header)}, expected "
            f"{', '.join(columns(kind))}; give another file"
        )
    types = get_type_hints(kind)
    rows = []
    try:
        for line in reader:
            if len(line) != len(header):
                raise ValueError(f"{len(line)} cells, expected {len(header)}")
            rows.append(kind(**{name: _parse(text, types[name]) for name, text in zip(header, line, strict=True)}))
    except (ValueError, csv.Error) as error:
        raise _DamagedLineError(
            f"{os.fspath(path)}, line {reader.line_num}: damaged ({error}); remove this line, and its row will be "
            "measured again",
            last=reader.line_num == len(lines),
        ) from error
    return rows


def _cell(value: Any, field: dataclasses.Field[Any]) -> Any:
    spec = field.metadata.get("format")
    return value if value is None or spec is None else format(value, spec)


def _parse(text: str, type_: Any) -> Any:
    options = get_args(type_) or (type_,)
    if NoneType in options and not text:
        return None
    (plain,) = (option for option in options if option is not NoneType)
    if plain is not bool:
        return plain(text)
    if text not in ("True", "False"):
        raise ValueError(f"{text!r} is neither True nor False")
    return text == "True"
