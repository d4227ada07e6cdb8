"""Locks between processes: only one at a time writes a file or a folder.

The operating system releases a lock when its process ends or is killed. At most an empty file is left, which the next
process uses and removes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_PAUSE = 0.05  # seconds between two attempts


class BusyError(OSError):
    """Another process is at work on the same file or folder."""


@contextmanager
def locked(
    path: str | os.PathLike[str], *, wait: bool = True, waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the lock of the file or folder at `path`, which need not exist yet.

    If another process holds it, call `waiting` once and wait; with `wait=False`, raise BusyError.
    """
    beside = lock_file(path)
    beside.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _try(beside)
    if descriptor is None:
        if not wait:
            raise BusyError(
                f"another process is writing {os.fspath(path)}; wait until it ends, or choose another place"
            )
        waiting()
        while (descriptor := _try(beside)) is None:
            time.sleep(_PAUSE)
    try:
        yield
    finally:
        # Removed while it is still held: a process that waits for it notices that the file is gone, and tries again.
        if sys.platform == "win32":
            os.close(descriptor)  # Windows does not remove open files
            with suppress(OSError):  # in use by the next process
                beside.unlink(missing_ok=True)
        else:
            beside.unlink(missing_ok=True)
            os.close(descriptor)


def lock_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of the lock of a file or folder.

    >>> lock_file("results/rows.csv").as_posix()
    'results/.rows.csv.lock'
    """
    path = Path(path)
    return path.with_name(f".{path.name}.lock")


def _try(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except OSError:  # held by another process, or removed meanwhile
        pass
    os.close(descriptor)
    return None
