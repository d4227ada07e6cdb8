"""A batch norm in evaluation mode, as Triton kernels apply it on their way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(mean, variance, weight, bias, epsilon, channel, channels, NORM: tl.constexpr):
    """A norm as scale * x + shift. Without one, the negative zero leaves every value as it is, its sign included."""
    if not NORM:
        return tl.full(channel.shape, 1.0, tl.float32), tl.full(channel.shape, -0.0, tl.float32)
    inside = channel < channels
    deviation = tl.sqrt_rn(tl.load(variance + channel, mask=inside, other=1.0).to(tl.float32) + epsilon)
    scale = tl.load(weight + channel, mask=inside, other=1.0).to(tl.float32) / deviation
    middle = tl.load(mean + channel, mask=inside, other=0.0).to(tl.float32)
    return scale, tl.fma(-middle, scale, tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32))
