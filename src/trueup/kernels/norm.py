"""A batch norm in evaluation mode, as what a kernel can do on its way."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.kernels.tangent import has_tangent


class Norm(NamedTuple):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, with `(channels,)` of each."""

    mean: Tensor
    variance: Tensor
    weight: Tensor
    bias: Tensor
    epsilon: float

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All but epsilon."""
        return self.mean, self.variance, self.weight, self.bias

    def __call__(self, x: Tensor) -> Tensor:
        """As torch does it."""
        return F.batch_norm(x, *self.tensors, training=False, eps=self.epsilon)

    def takes_gradients(self, *others: Tensor | None) -> bool:
        """Whether torch would have to take derivatives of it, or of the others."""
        tensors = (*self.tensors, *others)
        backward = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
        return backward or has_tangent(*tensors)
