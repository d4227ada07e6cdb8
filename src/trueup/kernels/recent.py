"""What is remembered of a site's last call, so that the next one of the same kind costs the host less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trueup.kernels.fused_norms import BatchNorm

Again = Callable[..., Tensor | None]
_NAME = "_trueup_recent"


class Recent:
    """Holds `again`, which makes a site's last call once more: another input of the same shape, type and layout.

    A copy of it, in this process or another, remembers nothing.
    """

    __slots__ = ("again",)

    def __init__(self) -> None:
        self.again: Again | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, ()


def recent_of(reference: Tensor) -> Recent:
    """What is remembered of the site with this reference. It is kept with the tensor, and goes with it."""
    found: Recent = reference.__dict__.setdefault(_NAME, Recent())
    return found


def realign_again(
    x: Tensor,
    reference: Tensor,
    gate: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    ceiling: float | None,
    norm: BatchNorm | None,
    channels: int,
) -> Tensor | None:
    """As `kernels.realign`, if the last call at this site was of the same kind, on a GPU; otherwise None.

    This takes a fraction of the time in which the backend finds out what to launch.
    """
    recent: Recent | None = reference.__dict__.get(_NAME)
    again = None if recent is None else recent.again
    return None if again is None else again(x, reference, gate, residual, relu, ceiling, norm, channels)
