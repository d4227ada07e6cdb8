"""Arithmetic that gives the same bytes whatever the batch, the thread count, the vector width or the device.

Sums of floats depend on their order, and the order depends on all of those. So the weights of every filter
here are multiples of 2**-16 that add up to one: on bytes, and on numbers in steps of 2**-16, each sum is then
exact in float64, and there is only one answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ONE = 1 << 16  # steps to one


@contextmanager
def full_precision() -> Iterator[None]:
    """Float32 matrix products without short cuts (TF32, bfloat16), whatever the user has allowed."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def quantise(weights: Tensor) -> Tensor:
    """Round rows of weights, each adding up to one, to multiples of 2**-16 that still do.

    What rounding leaves over goes to each row's largest weight.

    >>> quantise(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)).sum().item()
    1.0
    """
    rounded = (weights.double() * ONE).round()
    flat = rounded.reshape(-1, rounded.shape[-1])
    largest = flat.argmax(-1, keepdim=True)
    flat = flat.scatter_add(-1, largest, ONE - flat.sum(-1, keepdim=True))
    return flat.view_as(rounded) / ONE


def truncated(x: Tensor) -> Tensor:
    """Bytes as CIFAR-10-C and ImageNet-C make them: clipped, then cut.

    The originals work in float64, where a value that should be a whole number is one, or is just above it;
    the added 2**-12 does the same for float32.
    """
    return (x + 2**-12).clamp_(0, 255).to(torch.uint8)


def rounded(x: Tensor) -> Tensor:
    """Bytes as MNIST-C makes them: clipped, then rounded, halves to even."""
    return x.clamp(0, 255).round_().to(torch.uint8)
