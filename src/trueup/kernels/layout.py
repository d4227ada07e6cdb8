"""How tensors lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def in_memory_order(x: Tensor) -> Tensor | None:
    """Each row's values as they lie in memory `(batch, n)`, a view; None where they lie with gaps or interleaved.

    A distribution does not know the order of its values, so that channels-last needs no copy.
    """
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    if not dense and not x.permute(0, *sorted(range(1, x.dim()), key=x.stride, reverse=True)).is_contiguous():
        return None
    n = x.numel() // x.shape[0]
    return x.as_strided((x.shape[0], n), (n, 1))


def as_rows(a: Tensor) -> Tensor:
    """The values of each image of `(batch, ...)` as a row `(batch, n)`, in any order: without a copy if possible."""
    rows = in_memory_order(a)
    return a.reshape(len(a), -1) if rows is None else rows


def alike(a: Tensor, b: object) -> bool:
    """Whether `b` is a tensor of the shape, dtype and device of `a`, and lies in the same order in memory."""
    if not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()


def has_channels_last(a: Tensor) -> bool:
    """Whether these are vectors, or maps in torch's layout of that name, one image after the other without gaps."""
    return a.dim() in (2, 4, 5) and channels_lie_last(a) and _without_gaps(a)


def channels_lie_last(a: Tensor) -> bool:
    """Whether `(batch, channels, ...)` would be contiguous with the channels last."""
    if a.dim() == 4:
        return a.is_contiguous(memory_format=torch.channels_last)
    return a.movedim(1, -1).is_contiguous()


def norm_keeps_layout(a: Tensor) -> bool:
    """Whether torch's batch norm gives back a tensor that lies as this one; the same for one image as for more."""
    return has_channels_last(a) or (a.is_contiguous() and _without_gaps(a))


def _without_gaps(a: Tensor) -> bool:
    # Where there is but one image, torch does not ask how far it is to the next.
    return a.stride(0) * a.shape[0] == a.numel()
