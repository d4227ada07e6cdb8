"""Triton's copy of a batch norm in evaluation mode."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_and_shift(mean, variance, weight, bias, epsilon, channel, channels, NORM: tl.constexpr):
    """A norm as scale * x + shift. Without one, a shift of -0.0 leaves every value unchanged, even the sign of zero."""
    if not NORM:
        return tl.full(channel.shape, 1.0, tl.float32), tl.full(channel.shape, -0.0, tl.float32)
    inside = channel < channels
    deviation = tl.sqrt_rn(tl.load(variance + channel, mask=inside, other=1.0).to(tl.float32) + epsilon)
    scale = tl.load(weight + channel, mask=inside, other=1.0).to(tl.float32) / deviation
    centre = tl.load(mean + channel, mask=inside, other=0.0).to(tl.float32)
    return scale, tl.fma(-centre, scale, tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32))
