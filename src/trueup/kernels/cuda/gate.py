"""Triton's copy of `trueup.functional.gate`: gate values from the moments at the norms that the gate reads.

Torch's own operators need some eighty kernels, each shorter than its launch. Here there is one kernel per norm, which
computes normal scores, a matrix product, and one kernel for the rest. Everything is float64, as in `functional.gate`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.functional.gate import KNOTS, Gate
from trueup.kernels.cuda.launch import Launch, ready

BLOCK = 128  # channels, or features, that a program handles at a time
_KNOTS, _STEPS, _END = tl.constexpr(KNOTS), tl.constexpr(KNOTS.bit_length()), tl.constexpr(1 << KNOTS.bit_length())
_TWO_OVER_PI = tl.constexpr(2 / math.pi)


def gate_values(
    moments: Sequence[Tensor], floors: Sequence[Tensor], gate: Gate, budget: float, ramp: float, least: float
) -> Tensor:
    """As `trueup.kernels.gate_values`."""
    batch, features = len(moments[0]), gate.knots.shape[0]
    scores = moments[0].new_empty((batch, features), dtype=torch.float64)
    out = moments[0].new_empty((batch,), dtype=torch.float32)
    if batch == 0:
        return out
    knots, tails, top, centre, held = (ready(t) for t in (gate.knots, gate.tails, gate.top, gate.centre, gate.held))
    first = 0
    for measured, floor in zip(moments, floors, strict=True):
        _, k, channels = measured.shape
        launch = _launch_scores(batch, k, channels, features, first, (measured.dtype, floor.dtype), measured.device)
        launch((ready(measured), ready(floor), knots, tails, top, centre, scores), channels, features, first)
        first += channels * (4 if k == 5 else 2)
    white = scores @ gate.whiten
    launch = _launch_values(batch, features, len(held), ramp * budget, ramp, least, out.device)
    launch((white, held, out), features, len(held))
    return out


@functools.lru_cache(maxsize=256)
def _launch_scores(
    batch: int,
    k: int,
    channels: int,
    _features: int,
    _first: int,
    _dtypes: tuple[torch.dtype, torch.dtype],
    _device: torch.device,
) -> Launch:
    # Images lie along the first axis, the only one that may be longer than 65,535.
    return Launch(_scores_of_norm, (batch, triton.cdiv(channels, BLOCK), 1), (k, BLOCK), num_warps=4)


@functools.lru_cache(maxsize=256)
def _launch_values(
    batch: int, _features: int, held: int, closed: float, ramp: float, least: float, _device: torch.device
) -> Launch:
    # Floats are constants of the kernel: arguments would be float32, and p is compared with one of them.
    steps = held.bit_length()
    constants = (closed, math.log(ramp), least, BLOCK, steps, 1 << steps)
    return Launch(_values_of_images, (batch, 1, 1), constants, num_warps=4)


@triton.jit
def _scores_of_norm(
    moments, floor, knots, tails, top, centre, scores, channels, features, first, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Normal scores of one image's features at one norm, minus their centre. The norm's features begin at `first`."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    moments += image * K * channels + channel
    floor += channel
    scores += image * features
    top = tl.load(top)
    mean = tl.load(moments, mask=inside, other=0.0).to(tl.float64)
    feature = first + channel
    _store_scores(scores, mean, knots, tails, top, centre, feature, features, inside)
    if K == 2:
        deviation = _log_deviation(moments, floor, channels, inside, 1)
        _store_scores(scores, deviation, knots, tails, top, centre, feature + channels, features, inside)
    else:
        low = _log_deviation(moments, floor, channels, inside, 2)
        high = _log_deviation(moments, floor, channels, inside, 3)
        size = tl.load(moments + 4 * channels, mask=inside, other=1.0).to(tl.float64)
        least = tl.load(floor + 3 * channels, mask=inside, other=1.0)
        even = 0.5 * tl.log(size * size + _TWO_OVER_PI * least) - high
        _store_scores(scores, low, knots, tails, top, centre, feature + channels, features, inside)
        _store_scores(scores, high, knots, tails, top, centre, feature + 2 * channels, features, inside)
        _store_scores(scores, even, knots, tails, top, centre, feature + 3 * channels, features, inside)


@triton.jit
def _log_deviation(moments, floor, channels, inside, row):
    variance = tl.load(moments + row * channels, mask=inside, other=1.0).to(tl.float64)
    return 0.5 * tl.log(variance + tl.load(floor + row * channels, mask=inside, other=1.0))


@triton.jit
def _store_scores(scores, x, knots, tails, top, centre, feature, features, inside):
    """Store the scores of a feature `x`: `gate.normal_scores` minus the centre."""
    knots += feature * _KNOTS
    left, right = _knot_index(knots, x, inside, False), _knot_index(knots, x, inside, True)
    score = (left + right) / 2 * (2 * top / (_KNOTS - 1)) - top
    first = tl.load(knots, mask=inside, other=0.0)
    last = tl.load(knots + _KNOTS - 1, mask=inside, other=0.0)
    score += tl.maximum(x - last, 0.0) / tl.load(tails + feature, mask=inside, other=1.0)
    score -= tl.maximum(first - x, 0.0) / tl.load(tails + features + feature, mask=inside, other=1.0)
    score -= tl.load(centre + feature, mask=inside, other=0.0)
    # The score of an infinite feature is NaN, so that the image counts as not finite.
    tl.store(scores + feature, tl.where(tl.abs(x) < float("inf"), score, float("nan")), mask=inside)


@triton.jit
def _knot_index(knots, x, inside, RIGHT: tl.constexpr):
    """Fractional index of `x` among the knots: of several equal ones, the last if `RIGHT`, otherwise the first."""
    i = tl.minimum(tl.maximum(_count_below(knots, _KNOTS, x, inside, _STEPS, _END, RIGHT), 1), _KNOTS - 1)
    below = tl.load(knots + i - 1, mask=inside, other=0.0)
    above = tl.load(knots + i, mask=inside, other=1.0)
    return i - 1 + _position_between(x, below, above, (x >= below) if RIGHT else (x > below))


@triton.jit
def _count_below(values, n, x, inside, STEPS: tl.constexpr, END: tl.constexpr, EQUAL: tl.constexpr):
    """Number of the `n` ascending `values` that are less than `x`, or with `EQUAL` at most `x`: by bisection.

    `END` is 2 to the power of `STEPS` and greater than `n`.
    """
    found = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(STEPS):
        ahead = found + (END >> k + 1)
        value = tl.load(values + ahead - 1, mask=inside & (ahead <= n), other=float("inf"))
        found = tl.where((ahead <= n) & ((value <= x) if EQUAL else (value < x)), ahead, found)
    return found


@triton.jit
def _position_between(x, below, above, beyond):
    """Position of `x` between `below` (0) and `above` (1), limited to 0...1; if these are equal, `beyond` decides."""
    share = tl.where(above > below, (x - below) / tl.where(above > below, above - below, 1.0), beyond.to(tl.float64))
    return tl.minimum(tl.maximum(share, 0.0), 1.0)


@triton.jit
def _values_of_images(
    white, held, out, features, n,
    CLOSED: tl.constexpr, LOG_RAMP: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    END: tl.constexpr,
):  # fmt: skip
    """Gate value of an image from its whitened scores: `Gate.p_values` and `gate.gate_values`.

    g is 0 for p-values of `CLOSED` or more.
    """
    image = tl.program_id(0).to(tl.int64)
    white += image * features
    sums = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, features, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        part = tl.load(white + at, mask=at < features, other=0.0)
        sums += part * part
    found = tl.sum(sums, axis=0) / features
    p = tl.full([], 1.0, tl.float64)
    if n > 0:
        i = tl.maximum(_count_below(held, n, found, True, STEPS, END, False), 1)
        below = tl.load(held + i - 1)
        above = tl.where(i == n, 2 * below, tl.load(held + tl.minimum(i, n - 1)))
        p = (n + 2 - i - _position_between(found, below, above, found > below)) / (n + 1)
    p = tl.where(tl.abs(found) < float("inf"), p, 0.0)
    closed = tl.full([], CLOSED, tl.float64)  # a Python number would be rounded to float32
    opened = tl.log(tl.maximum(closed, 1e-30) / tl.maximum(p, 1e-30)) / LOG_RAMP
    g = tl.where(p < closed, tl.minimum(tl.maximum(opened, 0.0), 1.0), 0.0).to(tl.float32)
    tl.store(out + image, LEAST + (1 - LEAST) * g)
