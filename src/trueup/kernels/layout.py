"""Memory layouts of tensors: views of images as rows, and predicates for fusing."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor


def rows_in_any_order(a: Tensor) -> Tensor:
    """Flatten each image of `(batch, ...)` to a row `(batch, n)`, a view in the order of memory if possible."""
    rows = in_memory_order(a)
    return a.reshape(len(a), -1) if rows is None else rows


def in_memory_order(x: Tensor) -> Tensor | None:
    """View `(batch, n)` of each image's values in memory order; None if there are gaps.

    A distribution does not depend on the order of its values, so channels-last needs no copy.
    """
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    if not dense and not x.permute(0, *sorted(range(1, x.dim()), key=x.stride, reverse=True)).is_contiguous():
        return None
    n = x.numel() // x.shape[0]
    return x.as_strided((x.shape[0], n), (n, 1))


def same_layout(a: Tensor, b: object) -> TypeGuard[Tensor]:
    """Return whether `b` is a tensor of the shape, dtype, device and strides of `a`."""
    if not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()


def has_channels_last(a: Tensor) -> bool:
    """Return whether `a` holds vectors, or maps in torch's channels-last layout, without gaps between images."""
    return a.dim() in (2, 4, 5) and channels_lie_last(a) and _has_no_gaps(a)


def channels_lie_last(a: Tensor) -> bool:
    """Return whether `(batch, channels, ...)` would be contiguous with its channels moved last."""
    if a.dim() == 4:
        return a.is_contiguous(memory_format=torch.channels_last)
    return a.movedim(1, -1).is_contiguous()


def norm_keeps_layout(a: Tensor) -> bool:
    """Return whether torch's batch norm returns a tensor of the same strides, for one image as for several."""
    return has_channels_last(a) or (a.is_contiguous() and _has_no_gaps(a))


def _has_no_gaps(a: Tensor) -> bool:
    # For a single image, torch's `is_contiguous` ignores the distance to the next one.
    return a.stride(0) * a.shape[0] == a.numel()
