"""Progress of a decision, for whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """Progress in images that passed through a model. Fewer than the total may turn out to be needed."""

    def __init__(self, report: Callable[[int, int], None], total: int) -> None:
        self._report, self._done, self._total = report, 0, total

    def add(self, images: int) -> None:
        """Report more images."""
        self._done += images
        self._report(min(self._done, self._total - 1), self._total)

    def finish(self) -> None:
        """Report the end."""
        self._report(self._total, self._total)
