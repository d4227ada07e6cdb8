"""Float32 that is float32: numbers in tables must not depend on the short cuts that a GPU may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trueup_lab.data.corruptions.arithmetic import full_precision


@contextmanager
def measured_precision() -> Iterator[None]:
    """Matrix products and convolutions without TF32, whatever the user has allowed."""
    convolution = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolution.fp32_precision
    try:
        convolution.fp32_precision = "ieee"
        with full_precision():
            yield
    finally:
        convolution.fp32_precision = before
