"""What is remembered of a site's last calls, so that the next one of the same kind costs the host less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SHAPES = 8  # of inputs, of each of which the last call is remembered: a service has batches of several sizes
Again = Callable[..., Tensor | None]
_NAME = "_trueup_recent"


class Recent:
    """Holds what makes a site's last call once more, for each shape of its input.

    A copy of it, in this process or another, remembers nothing.
    """

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: dict[torch.Size, Again] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, ()

    def remember(self, shape: torch.Size, again: Again) -> None:
        """Remember a call. If there are too many shapes, the others are forgotten."""
        if len(self.calls) >= SHAPES and shape not in self.calls:
            self.calls.clear()
        self.calls[shape] = again


def recent_of(reference: Tensor) -> Recent:
    """What is remembered of the site with this reference. It is kept with the tensor, and goes with it."""
    found: Recent = reference.__dict__.setdefault(_NAME, Recent())
    return found


def realign_again(x: Tensor, reference: Tensor, *rest: Any) -> Tensor | None:
    """As `kernels.cuda.realign`, if the last call with this shape was of the same kind; otherwise None.

    This takes a fraction of the time in which the backend finds out what to launch. All arguments must be given.
    """
    recent: Recent | None = reference.__dict__.get(_NAME)
    again = None if recent is None else recent.calls.get(x.shape)
    return None if again is None else again(x, reference, *rest)
