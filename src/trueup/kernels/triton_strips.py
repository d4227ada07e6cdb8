"""What the Triton kernels of the rule of evidence are made of: going down a strip of some maps, in pairs of columns.

A program takes some channels of an image and goes down a strip of their maps, row by row, two columns a lane: one
beside the other where channels lie last, so that they share what is between, and else half a strip apart, so that
neighbouring lanes read neighbouring columns. Local means are sums over three rows, of which two are known from the row
before, and the row after the next is on its way while one is worked on.

Sums are those of a map without a *pivot*, the mean of its first values, since the mean is not known before the map was
read, and squares of what is far from zero would cancel in float32. With first values that are the share f of a map's,
(mean - pivot)² is at most (1 - f) / f variances, so that the variance is found within about 1 / f roundings.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_of(channels, segments, MAPS: tl.constexpr):
    """Which image, segment and channels a program does: all counted along one axis, the others end at 65,535."""
    tiles = tl.cdiv(channels, MAPS)
    above = tl.program_id(0) // tiles
    image = above // segments
    channel = (tl.program_id(0) - above * tiles) * MAPS + tl.arange(0, MAPS)
    return image.to(tl.int64), above - image * segments, channel


@triton.jit
def _segment(segment, rows, strips, EACH: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr):
    """The first row of a segment, the row after its last, and the first of each pair of its columns."""
    part = segment // strips
    top = part * EACH
    column = (2 if LAST else 1) * tl.arange(0, PAIRS)
    return top, tl.minimum(top + EACH, rows), (segment - part * strips) * 2 * PAIRS + column


@triton.jit
def _lanes(x, channel, column, y, channels, n, width, LAST: tl.constexpr):
    """Where some columns of row `y` of some maps are."""
    pixel = (y * width + column)[None, :]
    return x + (pixel * channels + channel[:, None] if LAST else channel[:, None] * n + pixel)


@triton.jit
def _inside(channel, column, channels, width, EVEN: tl.constexpr):
    """Which of some columns there are in a map, in some of as many channels."""
    inside = ((column >= 0) & (column < width))[None, :]
    return inside if EVEN else inside & (channel < channels)[:, None]


@triton.jit
def _masks(channel, column, channels, width, GAP: tl.constexpr, EVEN: tl.constexpr):
    """Which there are of the column before, itself and after, for the first and for the second of a pair."""
    return (
        _inside(channel, column - 1, channels, width, EVEN),
        _inside(channel, column, channels, width, EVEN),
        _inside(channel, column + 1, channels, width, EVEN),
        _inside(channel, column + GAP - 1, channels, width, EVEN),
        _inside(channel, column + GAP, channels, width, EVEN),
        _inside(channel, column + GAP + 1, channels, width, EVEN),
    )


@triton.jit
def _six(at, step, there, masks, PAIRS: tl.constexpr, LAST: tl.constexpr):
    """Each of a pair of columns and those beside it, of a row, if that is `there`."""
    a = tl.load(at - step, mask=masks[0] & there, other=0.0)
    b = tl.load(at, mask=masks[1] & there, other=0.0)
    c = tl.load(at + step, mask=masks[2] & there, other=0.0)
    f = tl.load(at + (2 if LAST else PAIRS + 1) * step, mask=masks[5] & there, other=0.0)
    if LAST:
        return a, b, c, b, c, f
    d = tl.load(at + (PAIRS - 1) * step, mask=masks[3] & there, other=0.0)
    e = tl.load(at + PAIRS * step, mask=masks[4] & there, other=0.0)
    return a, b, c, d, e, f


@triton.jit
def _three(row, LAST: tl.constexpr):
    """The sums of three around each of a pair."""
    a, b, c, d, e, f = row
    if LAST:
        pair = b.to(tl.float32) + c.to(tl.float32)
        return a.to(tl.float32) + pair, pair + f.to(tl.float32)
    before, after = a.to(tl.float32) + c.to(tl.float32), d.to(tl.float32) + f.to(tl.float32)
    return before + b.to(tl.float32), after + e.to(tl.float32)


@triton.jit
def _enter(at, down, step, top, rows, masks, PAIRS: tl.constexpr, LAST: tl.constexpr):
    """What is known at the top of a segment, whose first row is `at`: of the row above it and of the first, the sums of
    three, and the values of the first; and the second row, which lies `down` from the first.
    """
    above0, above1 = _three(_six(at - down, step, top > 0, masks, PAIRS, LAST), LAST)
    row = _six(at, step, True, masks, PAIRS, LAST)
    here0, here1 = _three(row, LAST)
    second = _six(at + down, step, top + 1 < rows, masks, PAIRS, LAST)
    return above0, above1, here0, here1, row[1].to(tl.float32), row[4].to(tl.float32), second


@triton.jit
def _share(at, length):
    """What each of two or three neighbours counts, along one side of a map; 0 outside of it."""
    before, after = at > 0, at < length - 1
    return tl.where(before & after, 1 / 3, tl.where(before | after, tl.where(at < length, 0.5, 0.0), 1.0))


@triton.jit
def pivot_of(x, channel, channels, n, width, LAST: tl.constexpr, EVEN: tl.constexpr):
    """The mean of the first values of each map."""
    column, count = tl.arange(0, 16), tl.minimum(tl.minimum(width, n), 16)
    inside = _inside(channel, column, channels, count, EVEN)
    first = tl.load(_lanes(x, channel, column, 0, channels, n, width, LAST), mask=inside, other=0.0)
    return tl.sum(first.to(tl.float32), axis=1) / count


@triton.jit
def sums_of(
    x, channel, segment, pivot, channels, n, width, rows, strips,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Over a segment, each map without its pivot: of the low and the high band, of their squares; of the values'
    squares, of the high band's absolute values. Without bands, all is in the low one, and the last two are 0.
    """
    top, bottom, column = _segment(segment, rows, strips, EACH, PAIRS, LAST)
    step = channels if LAST else 1
    gap: tl.constexpr = 1 if LAST else PAIRS  # between the two of a pair
    masks, down = _masks(channel, column, channels, width, gap, EVEN), width * step
    first, second = masks[1], masks[4]
    nothing = tl.zeros([MAPS, PAIRS], tl.float32)
    low, high, low2, high2, square, rough = nothing, nothing, nothing, nothing, nothing, nothing
    if not BANDS:
        for y in tl.range(top, bottom, loop_unroll_factor=2):
            at = _lanes(x, channel, column, y, channels, n, width, LAST)
            there0, there1 = first & (y * width + column < n)[None, :], second & (y * width + column + gap < n)[None, :]
            value0, value1 = tl.load(at, mask=there0, other=0.0), tl.load(at + gap * step, mask=there1, other=0.0)
            away0 = tl.where(there0, value0.to(tl.float32) - pivot[:, None], 0.0)
            away1 = tl.where(there1, value1.to(tl.float32) - pivot[:, None], 0.0)
            low += away0 + away1
            low2 = tl.fma(away1, away1, tl.fma(away0, away0, low2))
        none = tl.zeros([MAPS], tl.float32)
        return tl.sum(low, axis=1), none, tl.sum(low2, axis=1), none, none, none
    at = _lanes(x, channel, column, top, channels, n, width, LAST)
    above0, above1, here0, here1, value0, value1, row = _enter(at, down, step, top, rows, masks, PAIRS, LAST)
    at += down
    share0, share1 = _share(column, width), _share(column + gap, width)
    centre0, centre1 = tl.where(first, pivot[:, None], 0.0), tl.where(second, pivot[:, None], 0.0)
    for y in range(top, bottom):
        at += down
        following = _six(at, step, (y < bottom - 1) & (y + 2 < rows), masks, PAIRS, LAST)
        below0, below1 = _three(row, LAST)
        part = _share(y, rows)
        sum0, sum1 = above0 + here0 + below0, above1 + here1 + below1
        weight0, weight1 = (share0 * part)[None, :], (share1 * part)[None, :]
        smooth0, smooth1 = tl.fma(sum0, weight0, -centre0), tl.fma(sum1, weight1, -centre1)
        sharp0, sharp1 = tl.fma(sum0, -weight0, value0), tl.fma(sum1, -weight1, value1)
        low += smooth0 + smooth1
        high += sharp0 + sharp1
        low2 = tl.fma(smooth1, smooth1, tl.fma(smooth0, smooth0, low2))
        high2 = tl.fma(sharp1, sharp1, tl.fma(sharp0, sharp0, high2))
        if ALL:
            both0, both1 = smooth0 + sharp0, smooth1 + sharp1
            square = tl.fma(both1, both1, tl.fma(both0, both0, square))
            rough += tl.abs(sharp0) + tl.abs(sharp1)
        above0, above1, here0, here1 = here0, here1, below0, below1
        value0, value1 = row[1].to(tl.float32), row[4].to(tl.float32)
        row = following
    return (
        tl.sum(low, axis=1), tl.sum(high, axis=1), tl.sum(low2, axis=1), tl.sum(high2, axis=1),
        tl.sum(square, axis=1), tl.sum(rough, axis=1),
    )  # fmt: skip


@triton.jit
def coefficients(
    usual, gate, channel, pivot, low, high, low2, high2, scale, shift, channels, n,
    BANDS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """`channels.coefficients`, of values and their local means as they are: the start, two gains, and whether to move.

    With y = scale * x + shift: mean + d + l (low - tilt) + h (high + tilt), with low + mean the local mean of y, and
    low + high + mean its value, is d + (1 - l) mean - (l - h) tilt + h y + (l - h) local mean of y.
    """
    k: tl.constexpr = 3 if BANDS else 2
    mean = tl.fma(pivot + (low + high) / n, scale, shift)
    moved = _shift(usual, gate, channel, mean, 0, channels, k)
    average, tilt, square = low / n, -high / n, scale * scale
    soft = tl.exp(_deviation_shift(usual, gate, channel, (low2 / n - average * average) * square, 1, channels, k))
    if BANDS:
        gain = tl.exp(_deviation_shift(usual, gate, channel, (high2 / n - tilt * tilt) * square, 2, channels, k))
        gain_of_mean = soft - gain
        start = mean + moved - soft * mean - gain_of_mean * tilt * scale
    else:
        gain, gain_of_mean = soft, tl.zeros(soft.shape, tl.float32)
        start = mean + moved - soft * mean
    if GATED:
        start = tl.where(gate > 0, start, float("nan"))
    moves = (tl.abs(start) < float("inf")) & (gain < float("inf")) & (tl.abs(gain_of_mean) < float("inf"))
    start = tl.where(moves, tl.fma(gain + gain_of_mean, shift, start), shift)
    return start, tl.where(moves, gain * scale, scale), tl.where(moves, gain_of_mean * scale, -0.0), moves


@triton.jit
def _deviation_shift(usual, gate, channel, variance, which, channels, k: tl.constexpr):
    floor = tl.load(usual + (3 * k + which) * channels + channel, mask=channel < channels, other=1.0).to(tl.float32)
    return _shift(usual, gate, channel, 0.5 * tl.log(_not_negative(variance) + floor), which, channels, k)


@triton.jit
def _shift(usual, gate, channel, statistic, which, channels, k: tl.constexpr):
    """How far a statistic is moved: as `channels.shifts`."""
    at, inside = usual + which * channels + channel, channel < channels
    centre = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    spread = tl.load(at + k * channels, mask=inside, other=1.0).to(tl.float32)
    kappa = tl.load(at + 2 * k * channels, mask=inside, other=1.0).to(tl.float32)
    z = (statistic - centre) / spread
    z2 = tl.minimum(z * z, 1e30) * gate
    base = tl.load(at + 4 * k * channels, mask=inside, other=0.0).to(tl.float32) * gate
    return (base + (1 - base) * (z2 / (z2 + kappa))) * (centre - statistic)


@triton.jit
def _not_negative(variance):
    return tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def write_segment(
    x, residual, out, channel, segment, start, gain, gain_of_mean, moves, channels, n, width, rows, strips,
    PAIRS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """A segment of each map: start + gain * value + gain * local mean, or as it is where it is not moved."""
    top, bottom, column = _segment(segment, rows, strips, EACH, PAIRS, LAST)
    step = channels if LAST else 1
    gap: tl.constexpr = 1 if LAST else PAIRS  # between the two of a pair
    masks, down = _masks(channel, column, channels, width, gap, EVEN), width * step
    first, second = masks[1], masks[4]
    start, gain, gain_of_mean, moves = start[:, None], gain[:, None], gain_of_mean[:, None], moves[:, None]
    if BANDS:
        at = _lanes(x, channel, column, top, channels, n, width, LAST)
        above0, above1, here0, here1, value0, value1, row = _enter(at, down, step, top, rows, masks, PAIRS, LAST)
        at += down
        share0, share1 = _share(column, width), _share(column + gap, width)
        for y in range(top, bottom):
            at += down
            following = _six(at, step, (y < bottom - 1) & (y + 2 < rows), masks, PAIRS, LAST)
            below0, below1 = _three(row, LAST)
            part = _share(y, rows)
            local0 = (above0 + here0 + below0) * (share0 * part)[None, :]
            local1 = (above1 + here1 + below1) * (share1 * part)[None, :]
            # What is not moved may have local means that are no numbers.
            new0 = tl.fma(tl.where(moves, local0, 0.0), gain_of_mean, tl.fma(value0, gain, start))
            new1 = tl.fma(tl.where(moves, local1, 0.0), gain_of_mean, tl.fma(value1, gain, start))
            to = _lanes(out, channel, column, y, channels, n, width, LAST)
            more = _lanes(residual, channel, column, y, channels, n, width, LAST)
            _finish(to, more, new0, moves, first, ADD, RELU)
            _finish(to + gap * step, more + gap * step, new1, moves, second, ADD, RELU)
            above0, above1, here0, here1 = here0, here1, below0, below1
            value0, value1 = row[1].to(tl.float32), row[4].to(tl.float32)
            row = following
    else:
        for y in tl.range(top, bottom, loop_unroll_factor=2):
            at = _lanes(x, channel, column, y, channels, n, width, LAST)
            there0, there1 = first & (y * width + column < n)[None, :], second & (y * width + column + gap < n)[None, :]
            value0, value1 = tl.load(at, mask=there0, other=0.0), tl.load(at + gap * step, mask=there1, other=0.0)
            new0 = tl.fma(value0.to(tl.float32), gain, start)
            new1 = tl.fma(value1.to(tl.float32), gain, start)
            to = _lanes(out, channel, column, y, channels, n, width, LAST)
            more = _lanes(residual, channel, column, y, channels, n, width, LAST)
            _finish(to, more, new0, moves, there0, ADD, RELU)
            _finish(to + gap * step, more + gap * step, new1, moves, there1, ADD, RELU)


@triton.jit
def _finish(out, residual, value, moves, inside, ADD: tl.constexpr, RELU: tl.constexpr):
    """What follows in the model, and the result. What is not moved is rounded as if this were done in steps."""
    dtype: tl.constexpr = out.dtype.element_ty
    if dtype == tl.float16:  # a reference may lie beyond what float16 holds
        value = tl.where(moves, tl.minimum(tl.maximum(value, -65504.0), 65504.0), value)
    if ADD:
        value += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out, value.to(dtype), mask=inside)


@triton.jit
def tell(found, image, channel, pivot, low, high, low2, high2, square, rough, channels, n, BANDS: tl.constexpr):
    inside = channel < channels
    found += image * (5 if BANDS else 2) * channels + channel
    away, average, tilt = (low + high) / n, low / n, high / n
    tl.store(found, pivot + away, mask=inside)
    if BANDS:
        tl.store(found + channels, _not_negative(square / n - away * away), mask=inside)
        tl.store(found + 2 * channels, _not_negative(low2 / n - average * average), mask=inside)
        tl.store(found + 3 * channels, _not_negative(high2 / n - tilt * tilt), mask=inside)
        tl.store(found + 4 * channels, rough / n, mask=inside)
    else:
        tl.store(found + channels, _not_negative(low2 / n - away * away), mask=inside)
