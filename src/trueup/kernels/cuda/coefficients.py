"""Triton's copy of `functional.evidence.coefficients`. No other kernel holds the rule's formula."""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.functional.evidence import FARTHEST, LARGEST_EVIDENCE
from trueup.kernels.cuda.elementwise import relu

_FARTHEST, _LARGEST_EVIDENCE = tl.constexpr(FARTHEST), tl.constexpr(LARGEST_EVIDENCE)


@triton.jit
def load_reference(reference, channel, channels, BANDS: tl.constexpr):
    """Load the reference of some channels, as `coefficients` takes it: a kernel can do so while it waits for maps.

    It holds centre, spread, kappa and base of the mean, then the same and the floor of each deviation.
    """
    k: tl.constexpr = 3 if BANDS else 2
    at, inside = reference + channel, channel < channels
    mean = _load_statistic(at, inside, 0, channels, k)
    low = _load_statistic(at, inside, 1, channels, k), _load_floor(at, inside, 1, channels, k)
    if BANDS:
        return mean, low, (_load_statistic(at, inside, 2, channels, k), _load_floor(at, inside, 2, channels, k))
    return mean, low, low


@triton.jit
def _load_statistic(at, inside, which, channels, k: tl.constexpr):
    centre = tl.load(at + which * channels, mask=inside, other=0.0).to(tl.float32)
    spread = tl.load(at + (k + which) * channels, mask=inside, other=1.0).to(tl.float32)
    kappa = tl.load(at + (2 * k + which) * channels, mask=inside, other=1.0).to(tl.float32)
    base = tl.load(at + (4 * k + which) * channels, mask=inside, other=0.0).to(tl.float32)
    return centre, spread, kappa, base


@triton.jit
def _load_floor(at, inside, which, channels, k: tl.constexpr):
    return tl.load(at + (3 * k + which) * channels, mask=inside, other=1.0).to(tl.float32)


@triton.jit
def coefficients(known, gate, pivot, low, high, low2, high2, scale, shift, n, BANDS: tl.constexpr):
    """Return start, gain, gain of the local mean, and whether to move: `evidence.coefficients` for the values of maps.

    `known` is what `load_reference` loaded. Let y = scale * x + shift, low + mean its local mean and low + high + mean
    its value. Then the realigned value, mean + d + l (low - tilt) + h (high + tilt), is
    d + (1 - l) mean - (l - h) tilt + h y + (l - h) (local mean of y).
    """
    of_mean, of_low, of_high = known
    mean = tl.fma(pivot + (low + high) / n, scale, shift)
    mean_shift = _mean_shift(of_mean, gate, mean)
    tilt, square = -(high / n), scale * scale
    low_gain = tl.exp(_deviation_shift(of_low, gate, variance_of(low2, low, n) * square))
    if BANDS:
        gain = tl.exp(_deviation_shift(of_high, gate, variance_of(high2, high, n) * square))
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
def _mean_shift(statistic, gate, mean):
    away, share, base = _evidence(statistic, gate, mean)
    return -(share * away + (1 - share) * (base * away))


@triton.jit
def _deviation_shift(statistic_and_floor, gate, variance):
    statistic, floor = statistic_and_floor
    away, share, base = _evidence(statistic, gate, 0.5 * tl.log(relu(variance) + floor))
    square = tl.exp(2 * tl.minimum(tl.maximum(away, -_FARTHEST), _FARTHEST))
    return -(share * away + (1 - share) * (0.5 * tl.log(1 - base + base * square)))


@triton.jit
def _evidence(statistic, gate, value):
    """Distance of a value from its centre, the share of the distance that evidence removes, and the base."""
    centre, spread, kappa, base = statistic
    away = value - centre
    z = away / spread
    z2 = tl.minimum(z * z, _LARGEST_EVIDENCE) * gate
    return away, z2 / (z2 + kappa), base * gate
