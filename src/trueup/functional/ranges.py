"""The finite range of float16, outside which a target or a reference may lie."""

from __future__ import annotations

import torch
from torch import Tensor


def within_range(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit values to the finite range of float16 if they will be rounded to it."""
    if dtype != torch.float16:
        return x
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit)
