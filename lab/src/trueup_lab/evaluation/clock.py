"""The time limit of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Time limit: stops when another piece, as slow as the slowest so far, might not fit."""

    def __init__(self, limit: float | None) -> None:
        self.began, self.limit = time.monotonic(), limit
        self.slowest: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def stops(self, *kinds: str) -> bool:
        ahead = sum(self.slowest.get(kind, 0.0) for kind in kinds)
        # 30 % more, since the next piece may be slower.
        return self.limit is not None and self.elapsed + 1.3 * ahead > self.limit

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.slowest[kind] = max(self.slowest.get(kind, 0.0), time.monotonic() - began)
