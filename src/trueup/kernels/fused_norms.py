"""Norms as plain tensors, which a kernel can apply while it loads values."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.kernels.eager import has_tangent


class BatchNorm(NamedTuple):
    """Batch norm in evaluation mode: (x - mean) / sqrt(variance + epsilon) * weight + bias, each `(channels,)`."""

    mean: Tensor
    variance: Tensor
    weight: Tensor
    bias: Tensor
    epsilon: float

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All fields except epsilon."""
        return self.mean, self.variance, self.weight, self.bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply torch's own batch norm."""
        return F.batch_norm(x, *self.tensors, training=False, eps=self.epsilon)

    def needs_derivatives(self, *others: Tensor | None) -> bool:
        """Return whether autograd, in either mode, has to differentiate through this norm or the other tensors."""
        tensors = (*self.tensors, *others)
        backward = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
        return backward or has_tangent(*tensors)


class LayerNorm(NamedTuple):
    """Layer norm over the channels of tokens, which lie last; `weight` and `bias` are `(channels,)`."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        """Apply torch's own layer norm."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
