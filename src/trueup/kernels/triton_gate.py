"""The gate on a GPU, in Triton: how far images are open, from what its norms' maps are like.

In torch's own operators that is some eighty kernels, each shorter than the time to start it. Here it is one for each
norm that the gate reads, to make normal scores of what was measured, a matrix product, and one for the rest. All in
float64, as in `trueup.functional.gate`, of which these are the functions.
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

RAMP = 20.0
from trueup.kernels.triton_launch import Launch, aligned

BLOCK = 128  # channels, or scores, that a program does at a time
_KNOTS, _STEPS, _END = tl.constexpr(KNOTS), tl.constexpr(KNOTS.bit_length()), tl.constexpr(1 << KNOTS.bit_length())
_LOG_RAMP, _SQUARE_OF_MEAN = tl.constexpr(math.log(RAMP)), tl.constexpr(2 / math.pi)


def openness(moments: Sequence[Tensor], floors: Sequence[Tensor], gate: Gate, budget: float, least: float) -> Tensor:
    """`least` + (1 - least) g of each image `(batch,)` float32, from `channels.moments` at the gate's norms."""
    batch, features = len(moments[0]), gate.knots.shape[0]
    scores = moments[0].new_empty((batch, features), dtype=torch.float64)
    out = moments[0].new_empty((batch,), dtype=torch.float32)
    if batch == 0:
        return out
    knots, tails, top, centre, held = (_ready(t) for t in (gate.knots, gate.tails, gate.top, gate.centre, gate.held))
    first = 0
    for measured, floor in zip(moments, floors, strict=True):
        _, k, channels = measured.shape
        start = _scores(batch, k, channels, features, first, (measured.dtype, floor.dtype), measured.device)
        start(_ready(measured), _ready(floor), knots, tails, top, centre, scores, channels, features, first)
        first += channels * (4 if k == 5 else 2)
    white = scores @ gate.whiten
    _rest(batch, features, len(held), RAMP * budget, least, out.device)(white, held, out, features, len(held))
    return out


def _ready(tensor: Tensor) -> Tensor:
    return aligned(tensor.contiguous())


@functools.lru_cache(maxsize=256)
def _scores(
    batch: int,
    k: int,
    channels: int,
    _features: int,
    _first: int,
    _dtypes: tuple[torch.dtype, torch.dtype],
    _device: torch.device,
) -> Launch:
    # Images along the one axis that does not end at 65,535.
    return Launch(_score, (batch, triton.cdiv(channels, BLOCK), 1), (k, BLOCK), num_warps=4)


@functools.lru_cache(maxsize=256)
def _rest(batch: int, _features: int, held: int, closed: float, least: float, _device: torch.device) -> Launch:
    # Floats are constants of the kernel: arguments would be float32, and p is compared with one of them.
    steps = held.bit_length()
    return Launch(_open, (batch, 1, 1), (closed, least, BLOCK, steps, 1 << steps), num_warps=4)


@triton.jit
def _score(
    moments, floor, knots, tails, top, centre, scores, channels, features, first, K: tl.constexpr, BLOCK: tl.constexpr
):
    """The normal scores of one image's features at one norm, less their centre, from feature `first` on."""
    image = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    moments += image * K * channels + channel
    floor += channel
    scores += image * features
    top = tl.load(top)
    mean = tl.load(moments, mask=inside, other=0.0).to(tl.float64)
    feature = first + channel
    _put(scores, mean, knots, tails, top, centre, feature, features, inside)
    if K == 2:
        deviation = _log_deviation(moments, floor, channels, inside, 1)
        _put(scores, deviation, knots, tails, top, centre, feature + channels, features, inside)
    else:
        low = _log_deviation(moments, floor, channels, inside, 2)
        high = _log_deviation(moments, floor, channels, inside, 3)
        size = tl.load(moments + 4 * channels, mask=inside, other=1.0).to(tl.float64)
        least = tl.load(floor + 3 * channels, mask=inside, other=1.0)
        even = 0.5 * tl.log(size * size + _SQUARE_OF_MEAN * least) - high
        _put(scores, low, knots, tails, top, centre, feature + channels, features, inside)
        _put(scores, high, knots, tails, top, centre, feature + 2 * channels, features, inside)
        _put(scores, even, knots, tails, top, centre, feature + 3 * channels, features, inside)


@triton.jit
def _log_deviation(moments, floor, channels, inside, row):
    variance = tl.load(moments + row * channels, mask=inside, other=1.0).to(tl.float64)
    return 0.5 * tl.log(variance + tl.load(floor + row * channels, mask=inside, other=1.0))


@triton.jit
def _put(scores, x, knots, tails, top, centre, feature, features, inside):
    """Write the score of a feature: `gate.normal_scores`, less its centre."""
    knots += feature * _KNOTS
    left, right = _places(knots, x, inside, False), _places(knots, x, inside, True)
    score = (left + right) / 2 * (2 * top / (_KNOTS - 1)) - top
    first = tl.load(knots, mask=inside, other=0.0)
    last = tl.load(knots + _KNOTS - 1, mask=inside, other=0.0)
    score += tl.maximum(x - last, 0.0) / tl.load(tails + feature, mask=inside, other=1.0)
    score -= tl.maximum(first - x, 0.0) / tl.load(tails + features + feature, mask=inside, other=1.0)
    score -= tl.load(centre + feature, mask=inside, other=0.0)
    # What is not finite has no score.
    tl.store(scores + feature, tl.where(tl.abs(x) < float("inf"), score, float("nan")), mask=inside)


@triton.jit
def _places(knots, x, inside, RIGHT: tl.constexpr):
    """How many knots `x` lies above the first; of equal ones, all or none count."""
    i = tl.minimum(tl.maximum(_rank(knots, _KNOTS, x, inside, _STEPS, _END, RIGHT), 1), _KNOTS - 1)
    below = tl.load(knots + i - 1, mask=inside, other=0.0)
    above = tl.load(knots + i, mask=inside, other=1.0)
    return i - 1 + _between(x, below, above, (x >= below) if RIGHT else (x > below))


@triton.jit
def _rank(values, n, x, inside, STEPS: tl.constexpr, END: tl.constexpr, EQUAL: tl.constexpr):
    """How many of `n` ascending values are less than `x`, or with `EQUAL` no more.

    It takes so many steps, each half as wide as the one before; `END`, 2 to their number, is more than `n`.
    """
    found = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(STEPS):
        more = found + (END >> k + 1)
        value = tl.load(values + more - 1, mask=inside & (more <= n), other=float("inf"))
        found = tl.where((more <= n) & ((value <= x) if EQUAL else (value < x)), more, found)
    return found


@triton.jit
def _between(x, below, above, beyond):
    """How far `x` is on its way from `below` to `above`, 0 to 1; where these are equal, whether it is `beyond`."""
    share = tl.where(above > below, (x - below) / tl.where(above > below, above - below, 1.0), beyond.to(tl.float64))
    return tl.minimum(tl.maximum(share, 0.0), 1.0)


@triton.jit
def _open(
    white, held, out, features, n,
    CLOSED: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """How far an image is open, from its uncorrelated scores: `Gate.p_values` and `gate.openness`.

    It is shut from the p-value `CLOSED` on, and open by `LEAST` even then.
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
        i = tl.maximum(_rank(held, n, found, True, STEPS, END, False), 1)
        below = tl.load(held + i - 1)
        above = tl.where(i == n, 2 * below, tl.load(held + tl.minimum(i, n - 1)))
        p = (n + 2 - i - _between(found, below, above, found > below)) / (n + 1)
    p = tl.where(tl.abs(found) < float("inf"), p, 0.0)
    closed = tl.full([], CLOSED, tl.float64)  # a number beside p would be rounded to float32
    opened = tl.log(tl.maximum(closed, 1e-30) / tl.maximum(p, 1e-30)) / _LOG_RAMP
    g = tl.where(p < closed, tl.minimum(tl.maximum(opened, 0.0), 1.0), 0.0).to(tl.float32)
    tl.store(out + image, LEAST + (1 - LEAST) * g)
