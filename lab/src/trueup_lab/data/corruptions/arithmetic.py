"""Arithmetic that gives the same bytes for every batch size, thread count, vector width and device.

All of those change the order in which floats are added, and so the sum. Every filter here therefore has weights that
are multiples of 2**-16 and add up to one: sums over bytes, and over multiples of 2**-16, are then exact in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ONE = 1 << 16  # weights are multiples of 1 / ONE


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 matrix products in full precision, even where the user has allowed TF32 or bfloat16."""
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
    """Round rows of weights that add up to one to multiples of 2**-16 that still add up to one.

    Each row's rounding error goes to its largest weight.

    >>> quantise(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)).sum().item()
    1.0
    """
    rounded = (weights.double() * ONE).round()
    flat = rounded.reshape(-1, rounded.shape[-1])
    largest = flat.argmax(-1, keepdim=True)
    flat = flat.scatter_add(-1, largest, ONE - flat.sum(-1, keepdim=True))
    return flat.view_as(rounded) / ONE


def truncated(x: Tensor) -> Tensor:
    """Clip and truncate to bytes, as CIFAR-10-C and ImageNet-C do.

    The originals work in float64, where a value that should be an integer is one, or lies just above; adding 2**-12
    has the same effect in float32.
    """
    return (x + 2**-12).clamp_(0, 255).to(torch.uint8)


def rounded(x: Tensor) -> Tensor:
    """Clip and round to bytes, halves to even, as MNIST-C does."""
    return x.clamp(0, 255).round_().to(torch.uint8)
