"""Detect forward-mode derivatives, which custom operators do not support: torch silently takes them as zero."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether a tensor carries a forward-mode derivative, so that only torch's own operators are right."""
    if forward_ad._current_level < 0:  # the check that `unpack_dual` begins with, once for all tensors
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)  # type: ignore[no-untyped-call]
