"""Elementwise steps that several Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def relu(x):
    """Raise negative values to 0. NaN stays NaN, as in torch."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp_to_float16(x):
    """Limit values to the finite range of float16."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0)
