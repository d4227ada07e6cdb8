"""Rows as they lie in memory."""

from __future__ import annotations

from torch import Tensor


def in_memory_order(x: Tensor) -> Tensor | None:
    """Each row's values as they lie in memory `(batch, n)`, a view; None where they lie with gaps or interleaved.

    A distribution does not know the order of its values, so that channels-last needs no copy.
    """
    if not x.is_contiguous():
        x = x.permute(0, *sorted(range(1, x.dim()), key=x.stride, reverse=True))
        if not x.is_contiguous():
            return None
    return x.view(x.shape[0], -1)
