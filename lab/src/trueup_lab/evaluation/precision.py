"""Full float32 precision, so that numbers in tables do not depend on a GPU's shortcuts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trueup_lab.data.corruptions.arithmetic import full_precision


@contextmanager
def measured_precision() -> Iterator[None]:
    """Compute matrix products and convolutions without TF32, regardless of the user's settings."""
    convolution = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolution.fp32_precision
    try:
        convolution.fp32_precision = "ieee"
        with full_precision():
            yield
    finally:
        convolution.fp32_precision = before
