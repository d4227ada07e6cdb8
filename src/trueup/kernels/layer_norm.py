"""A layer norm over the channels of tokens as plain tensors, which a kernel can apply while it loads values."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class LayerNorm(NamedTuple):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension; each tensor is `(channels,)`."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """Apply torch's own layer norm."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
