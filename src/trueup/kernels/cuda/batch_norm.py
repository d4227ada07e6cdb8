"""Triton's copy of a batch norm in evaluation mode."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_and_shift(mean, variance, weight, bias, epsilon, channel, channels, normed):
    """A norm as scale * x + shift. Unless `normed`, a shift of -0.0 leaves every value unchanged, even -0.0."""
    inside = (channel < channels) & (normed > 0)
    deviation = tl.sqrt_rn(tl.load(variance + channel, mask=inside, other=1.0).to(tl.float32) + epsilon)
    scale = tl.load(weight + channel, mask=inside, other=1.0).to(tl.float32) / deviation
    centre = tl.load(mean + channel, mask=inside, other=0.0).to(tl.float32)
    shift = tl.fma(-centre, scale, tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32))
    return tl.where(inside, scale, 1.0), tl.where(inside, shift, -0.0)
