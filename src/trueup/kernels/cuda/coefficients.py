"""Triton's copy of `functional.evidence.coefficients`. No other kernel holds the rule's formula."""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.functional.evidence import FARTHEST, LARGEST_EVIDENCE
from trueup.kernels.cuda.elementwise import relu

_FARTHEST, _LARGEST_EVIDENCE = tl.constexpr(FARTHEST), tl.constexpr(LARGEST_EVIDENCE)


@triton.jit
def coefficients(
    reference, gate, channel, pivot, low, high, low2, high2, scale, shift, channels, n,
    BANDS: tl.constexpr,
):  # fmt: skip
    """Return start, gain, gain of the local mean, and whether to move: `evidence.coefficients` for the values of maps.

    Let y = scale * x + shift, low + mean its local mean and low + high + mean its value. Then the realigned value,
    mean + d + l (low - tilt) + h (high + tilt), is d + (1 - l) mean - (l - h) tilt + h y + (l - h) (local mean of y).
    """
    k: tl.constexpr = 3 if BANDS else 2
    mean = tl.fma(pivot + (low + high) / n, scale, shift)
    mean_shift = _mean_shift(reference, gate, channel, mean, channels, k)
    tilt, square = -(high / n), scale * scale
    low_gain = tl.exp(_deviation_shift(reference, gate, channel, variance_of(low2, low, n) * square, 1, channels, k))
    if BANDS:
        gain = tl.exp(_deviation_shift(reference, gate, channel, variance_of(high2, high, n) * square, 2, channels, k))
        gain_of_mean = low_gain - gain
        start = mean + mean_shift - low_gain * mean - gain_of_mean * tilt * scale
    else:
        gain, gain_of_mean = low_gain, tl.zeros(low_gain.shape, tl.float32)
        start = mean + mean_shift - low_gain * mean
    start = tl.where(gate > 0, start, float("nan"))  # a closed image is not moved
    moves = (tl.abs(start) < float("inf")) & (gain < float("inf")) & (tl.abs(gain_of_mean) < float("inf"))
    start = tl.where(moves, tl.fma(gain + gain_of_mean, shift, start), shift)
    return start, tl.where(moves, gain * scale, scale), tl.where(moves, gain_of_mean * scale, -0.0), moves


@triton.jit
def variance_of(squares, total, n):
    """Variance from the sums of squares and of values; rounding may make it negative."""
    mean = total / n
    return squares / n - mean * mean


@triton.jit
def _mean_shift(reference, gate, channel, mean, channels, k: tl.constexpr):
    away, share, base = _evidence(reference, gate, channel, mean, 0, channels, k)
    return -(share * away + (1 - share) * (base * away))


@triton.jit
def _deviation_shift(reference, gate, channel, variance, which, channels, k: tl.constexpr):
    floor = tl.load(reference + (3 * k + which) * channels + channel, mask=channel < channels, other=1.0).to(tl.float32)
    statistic = 0.5 * tl.log(relu(variance) + floor)
    away, share, base = _evidence(reference, gate, channel, statistic, which, channels, k)
    square = tl.exp(2 * tl.minimum(tl.maximum(away, -_FARTHEST), _FARTHEST))
    return -(share * away + (1 - share) * (0.5 * tl.log(1 - base + base * square)))


@triton.jit
def _evidence(reference, gate, channel, statistic, which, channels, k: tl.constexpr):
    """Distance of a statistic from its centre, the share of the distance that evidence removes, and the base."""
    at, inside = reference + which * channels + channel, channel < channels
    centre = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    spread = tl.load(at + k * channels, mask=inside, other=1.0).to(tl.float32)
    kappa = tl.load(at + 2 * k * channels, mask=inside, other=1.0).to(tl.float32)
    base = tl.load(at + 4 * k * channels, mask=inside, other=0.0).to(tl.float32)
    away = statistic - centre
    z = away / spread
    z2 = tl.minimum(z * z, _LARGEST_EVIDENCE) * gate
    return away, z2 / (z2 + kappa), base * gate
