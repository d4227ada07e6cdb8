"""Forward-mode derivatives: custom operators have none, and torch takes them for zero without a word."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward-mode derivatives go through one of these tensors: torch's own operators are to be used then."""
    if forward_ad._current_level < 0:  # as `unpack_dual` asks first, but for all at once
        return False
    some = [tensor for tensor in tensors if tensor is not None]
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in some)  # type: ignore[no-untyped-call]
