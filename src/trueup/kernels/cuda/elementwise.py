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


@triton.jit
def scale_and_shift(mean, variance, weight, bias, epsilon, channel, channels, normed):
    """A norm as scale * x + shift. Unless `normed`, a shift of -0.0 leaves every value unchanged, even -0.0."""
    inside = (channel < channels) & (normed > 0)
    deviation = tl.sqrt_rn(tl.load(variance + channel, mask=inside, other=1.0).to(tl.float32) + epsilon)
    scale = tl.load(weight + channel, mask=inside, other=1.0).to(tl.float32) / deviation
    centre = tl.load(mean + channel, mask=inside, other=0.0).to(tl.float32)
    shift = tl.fma(-centre, scale, tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32))
    return tl.where(inside, scale, 1.0), tl.where(inside, shift, -0.0)
