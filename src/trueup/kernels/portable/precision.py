"""Change the precision of values only where it changes: in an exported graph, a cast to the same one stays."""

from __future__ import annotations

import torch
from torch import Tensor


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values.to(dtype)`, which leaves two nodes in a graph from `torch.export` even if nothing changes."""
    return values if values.dtype == dtype else values.to(dtype)


def widened(values: Tensor) -> Tensor:
    """The values in the precision of the backend: float64 if they have it, else float32."""
    return values if values.dtype == torch.float64 else cast(values, torch.float32)
