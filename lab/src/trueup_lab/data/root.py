"""Where data sets live: one folder, the sets below it in the layouts they are published in."""

from __future__ import annotations

import os
from pathlib import Path


class MissingDataError(FileNotFoundError):
    """A data set is not where it was looked for. The message names the path and the way to get it."""


def data_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The data root: `given`, else `$TRUEUP_DATA`, else the user's cache directory.

    >>> data_root("/somewhere").as_posix()
    '/somewhere'
    """
    if given is not None:
        return Path(given).expanduser()
    if named := os.environ.get("TRUEUP_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "trueup"
