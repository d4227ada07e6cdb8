"""The data root: one folder that holds all data sets, each in its published layout."""

from __future__ import annotations

import os
from pathlib import Path

DataRoot = str | os.PathLike[str] | None
"""A data root as functions take it; None selects the default of `data_root`."""


class MissingDataError(FileNotFoundError):
    """A data set is missing. The message names the path and the way to get the data."""


def data_root(given: DataRoot = None) -> Path:
    """Return the data root: `given`, else `$TRUEUP_DATA`, else the user's cache directory.

    >>> data_root("/somewhere").as_posix()
    '/somewhere'
    """
    if given is not None:
        return Path(given).expanduser()
    if named := os.environ.get("TRUEUP_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "trueup"
