"""What the Triton kernels of the rule of evidence are made of: going down a strip of some maps, in pairs of columns.

A program takes some channels of an image and goes down a strip of their maps, row by row, two columns a lane: one
beside the other where channels lie last, so that they share what is between, and else half a strip apart, so that
neighbouring lanes read neighbouring columns. Local means are sums over three rows, each a sum over three columns, which
is known from the row before.

Where channels lie last, it takes two rows at a time, which saves a sum and most of the moving of numbers from register
to register, while the next are on their way to the processor's own memory. Elsewhere neighbours do not lie at round
addresses, which that memory is slow to take; there it is one row at a time, with the next but one on its way to
registers.

Sums are those of a map without a *pivot*, the mean of its first values, since the mean is not known before the map was
read, and squares of what is far from zero would cancel in float32. With first values that are the share f of a map's,
(mean - pivot)² is at most (1 - f) / f variances, so that the variance is found within about 1 / f roundings.
"""

from __future__ import annotations

import triton
import triton.language as tl

_AHEAD = tl.constexpr(3)  # pairs of rows that are worked on or on their way
_LEVELS = tl.constexpr(5)  # of a sum of 32 numbers, the most pairs of columns that a strip has


@triton.jit
def part_of(channels, stretches, MAPS: tl.constexpr):
    """Which image, stretch and channels a program does: all counted along one axis, the others end at 65,535."""
    tiles = tl.cdiv(channels, MAPS)
    above = tl.program_id(0) // tiles
    image = above // stretches
    channel = (tl.program_id(0) - above * tiles) * MAPS + tl.arange(0, MAPS)
    return image.to(tl.int64), above - image * stretches, channel


@triton.jit
def columns_of(strip, PAIRS: tl.constexpr, LAST: tl.constexpr):
    """The first of each pair of a strip's columns."""
    return strip * 2 * PAIRS + (2 if LAST else 1) * tl.arange(0, PAIRS)


@triton.jit
def _row(x, y, channel, column, channels, n, width, LAST: tl.constexpr):
    """Where row `y` of some maps is: of all of them where channels lie last, and else each lane's own place."""
    return x + (y * width * channels if LAST else channel[:, None] * n + (y * width + column)[None, :])


@triton.jit
def _spots(channel, column, channels, GAP: tl.constexpr, LAST: tl.constexpr):
    """Where, from `_row` on, are the column before, itself and after, for the first and for the second of a pair.

    As what the compiler keeps in fewest registers: all from one place, or few from each lane's.
    """
    if LAST:
        at = column[None, :] * channels + channel[:, None]
        spots = at - channels, at, at + channels, at, at + channels, at + 2 * channels
    else:
        spots = -1, 0, 1, GAP - 1, GAP, GAP + 1
    return spots


@triton.jit
def _inside(channel, column, channels, width, EVEN: tl.constexpr):
    """Which of some columns there are in a map, in some of as many channels."""
    inside = ((column >= 0) & (column < width))[None, :]
    return inside if EVEN else inside & (channel < channels)[:, None]


@triton.jit
def _masks(channel, column, channels, width, GAP: tl.constexpr, EVEN: tl.constexpr):
    """Which there are of those of `_spots`."""
    return (
        _inside(channel, column - 1, channels, width, EVEN),
        _inside(channel, column, channels, width, EVEN),
        _inside(channel, column + 1, channels, width, EVEN),
        _inside(channel, column + GAP - 1, channels, width, EVEN),
        _inside(channel, column + GAP, channels, width, EVEN),
        _inside(channel, column + GAP + 1, channels, width, EVEN),
    )


@triton.jit
def _six(row, spots, there, masks, LAST: tl.constexpr):
    """Each of a pair of columns and those beside it, of a row, if that is `there`."""
    a = tl.load(row + spots[0], mask=masks[0] & there, other=0.0)
    b = tl.load(row + spots[1], mask=masks[1] & there, other=0.0)
    c = tl.load(row + spots[2], mask=masks[2] & there, other=0.0)
    f = tl.load(row + spots[5], mask=masks[5] & there, other=0.0)
    if LAST:
        return a, b, c, b, c, f
    d = tl.load(row + spots[3], mask=masks[3] & there, other=0.0)
    e = tl.load(row + spots[4], mask=masks[4] & there, other=0.0)
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
def enter(
    x, channel, top, column, channels, n, width,
    PAIRS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What is known at the top of some rows: the sums of three of the row above and of the first, and its values."""
    gap: tl.constexpr = 1 if LAST else PAIRS  # between the two of a pair
    masks, spots = _masks(channel, column, channels, width, gap, EVEN), _spots(channel, column, channels, gap, LAST)
    row = _row(x, top, channel, column, channels, n, width, LAST)
    above = _three(_six(row - width * (channels if LAST else 1), spots, top > 0, masks, LAST), LAST)
    first = _six(row, spots, True, masks, LAST)
    return above, _three(first, LAST), (first[1], first[4])


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
    spots = _spots(channel, column, channels, 1, LAST)
    first = tl.load(_row(x, 0, channel, column, channels, n, width, LAST) + spots[1], mask=inside, other=0.0)
    return _added(first.to(tl.float32)) / count


@triton.jit
def _added(lanes):
    """The sum along the second axis, of a length that is a power of two, always in the same order.

    `tl.sum` adds in one that depends on how many threads there are, and on the kernel around it.
    """
    for _ in tl.static_range(_LEVELS):
        if lanes.shape[1] > 1:
            first, second = tl.split(tl.reshape(lanes, [lanes.shape[0], lanes.shape[1] // 2, 2]))
            lanes = first + second
    return tl.reshape(lanes, [lanes.shape[0]])


@triton.jit
def plain_sums_of(
    x, channel, top, bottom, column, pivot, channels, n, width,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Over the rows from `top` to `bottom`, each map without its pivot: the sums of the values and of their squares, in
    the places of the low band's in `sums_of`, where there are no bands.
    """
    gap: tl.constexpr = 1 if LAST else PAIRS  # between the two of a pair
    masks, spots = _masks(channel, column, channels, width, gap, EVEN), _spots(channel, column, channels, gap, LAST)
    low, low2 = tl.zeros([MAPS, PAIRS], tl.float32), tl.zeros([MAPS, PAIRS], tl.float32)
    for y in tl.range(top, bottom, loop_unroll_factor=2):
        there0, there1 = _there(y * width + column, n, masks, gap)
        row = _row(x, y, channel, column, channels, n, width, LAST)
        value0, value1 = _pair(row, spots, there0, there1)
        away0 = tl.where(there0, value0.to(tl.float32) - pivot[:, None], 0.0)
        away1 = tl.where(there1, value1.to(tl.float32) - pivot[:, None], 0.0)
        low += away0 + away1
        low2 = tl.fma(away1, away1, tl.fma(away0, away0, low2))
    none = tl.zeros([MAPS], tl.float32)
    return _added(low), none, _added(low2), none, none, none


@triton.jit
def sums_of(
    x, state, channel, top, bottom, column, pivot, channels, n, width, rows,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Over the rows from `top`, where `state` is what `enter` would find, to `bottom`, each map without its pivot: the
    sums of the low and the high band, of their squares; with `ALL`, of the values' squares, of the high band's absolute
    values. And the state at `bottom`.
    """
    gap: tl.constexpr = 1 if LAST else PAIRS
    masks, down = _masks(channel, column, channels, width, gap, EVEN), width * (channels if LAST else 1)
    spots = _spots(channel, column, channels, gap, LAST)
    nothing = tl.zeros([MAPS, PAIRS], tl.float32)
    above, here, values = state
    row = _row(x, top + 1, channel, column, channels, n, width, LAST)
    shares = _share(column, width), _share(column + gap, width)
    centres = tl.where(masks[1], pivot[:, None], 0.0), tl.where(masks[4], pivot[:, None], 0.0)
    sums = nothing, nothing, nothing, nothing, nothing, nothing
    if LAST:
        for y in tl.range(top, bottom - 1, 2, num_stages=_AHEAD):
            one = _six(row, spots, True, masks, LAST)
            two = _six(row + down, spots, y + 2 < rows, masks, LAST)
            row += 2 * down
            below, under = _three(one, LAST), _three(two, LAST)
            between = here[0] + below[0], here[1] + below[1]
            nine = above[0] + between[0], above[1] + between[1]
            sums = _with_row(sums, nine, values, shares, centres, _share(y, rows), ALL)
            nine = between[0] + under[0], between[1] + under[1]
            sums = _with_row(sums, nine, (one[1], one[4]), shares, centres, _share(y + 1, rows), ALL)
            above, here, values = below, under, (two[1], two[4])
        if (bottom - top) % 2 == 1:  # the last row of a map: what lies above it is even
            nine = above[0] + here[0], above[1] + here[1]
            sums = _with_row(sums, nine, values, shares, centres, _share(bottom - 1, rows), ALL)
    else:
        following = _six(row, spots, top + 1 < rows, masks, LAST)
        for y in range(top, bottom):
            row += down
            next_but_one = _six(row, spots, (y < bottom - 1) & (y + 2 < rows), masks, LAST)
            below = _three(following, LAST)
            nine = above[0] + (here[0] + below[0]), above[1] + (here[1] + below[1])
            sums = _with_row(sums, nine, values, shares, centres, _share(y, rows), ALL)
            above, here, values = here, below, (following[1], following[4])
            following = next_but_one
    low, high, low2, high2, square, rough = sums
    sums = (
        _added(low), _added(high), _added(low2), _added(high2),
        _added(square), _added(rough),
    )  # fmt: skip
    return sums, (above, here, values)


@triton.jit
def _with_row(sums, nine, values, shares, centres, part, ALL: tl.constexpr):
    """The sums of `sums_of` with those of a row, of which the sums of nine and the values are given."""
    low, high, low2, high2, square, rough = sums
    weight0, weight1 = (shares[0] * part)[None, :], (shares[1] * part)[None, :]
    smooth0, smooth1 = tl.fma(nine[0], weight0, -centres[0]), tl.fma(nine[1], weight1, -centres[1])
    sharp0 = tl.fma(nine[0], -weight0, values[0].to(tl.float32))
    sharp1 = tl.fma(nine[1], -weight1, values[1].to(tl.float32))
    low += smooth0 + smooth1
    high += sharp0 + sharp1
    low2 = tl.fma(smooth1, smooth1, tl.fma(smooth0, smooth0, low2))
    high2 = tl.fma(sharp1, sharp1, tl.fma(sharp0, sharp0, high2))
    if ALL:
        both0, both1 = smooth0 + sharp0, smooth1 + sharp1
        square = tl.fma(both1, both1, tl.fma(both0, both0, square))
        rough += tl.abs(sharp0) + tl.abs(sharp1)
    return low, high, low2, high2, square, rough


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
    moved = _mean_shift(usual, gate, channel, mean, channels, k)
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
def _mean_shift(usual, gate, channel, mean, channels, k: tl.constexpr):
    away, share, base = _evidence(usual, gate, channel, mean, 0, channels, k)
    return -(share * away + (1 - share) * (base * away))


@triton.jit
def _deviation_shift(usual, gate, channel, variance, which, channels, k: tl.constexpr):
    floor = tl.load(usual + (3 * k + which) * channels + channel, mask=channel < channels, other=1.0).to(tl.float32)
    statistic = 0.5 * tl.log(_not_negative(variance) + floor)
    away, share, base = _evidence(usual, gate, channel, statistic, which, channels, k)
    square = tl.exp(2 * tl.minimum(tl.maximum(away, -20.0), 20.0))
    return -(share * away + (1 - share) * (0.5 * tl.log(1 - base + base * square)))


@triton.jit
def _evidence(usual, gate, channel, statistic, which, channels, k: tl.constexpr):
    """How far a statistic is from its centre, what share of that evidence takes away, and its base."""
    at, inside = usual + which * channels + channel, channel < channels
    centre = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    spread = tl.load(at + k * channels, mask=inside, other=1.0).to(tl.float32)
    kappa = tl.load(at + 2 * k * channels, mask=inside, other=1.0).to(tl.float32)
    base = tl.load(at + 4 * k * channels, mask=inside, other=0.0).to(tl.float32)
    away = statistic - centre
    z = away / spread
    z2 = tl.minimum(z * z, 1e30) * gate
    return away, z2 / (z2 + kappa), base * gate


@triton.jit
def _not_negative(variance):
    return tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def write_plain_rows(
    x, residual, out, channel, top, bottom, column, start, gain, moves, channels, n, width,
    PAIRS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Some rows of each map: start + gain * value, or as it is where it is not moved."""
    gap: tl.constexpr = 1 if LAST else PAIRS
    masks, spots = _masks(channel, column, channels, width, gap, EVEN), _spots(channel, column, channels, gap, LAST)
    for y in tl.range(top, bottom, loop_unroll_factor=2):
        there0, there1 = _there(y * width + column, n, masks, gap)
        row = _row(x, y, channel, column, channels, n, width, LAST)
        more = _row(residual, y, channel, column, channels, n, width, LAST)
        to = _row(out, y, channel, column, channels, n, width, LAST)
        value0, value1 = _pair(row, spots, there0, there1)
        more0, more1 = _pair(more, spots, there0, there1) if ADD else (value0, value1)
        new0 = tl.fma(value0.to(tl.float32), gain[:, None], start[:, None])
        new1 = tl.fma(value1.to(tl.float32), gain[:, None], start[:, None])
        _finish(to + spots[1], new0, more0, moves[:, None], there0, ADD, RELU)
        _finish(to + spots[4], new1, more1, moves[:, None], there1, ADD, RELU)


@triton.jit
def write_rows(
    x, residual, out, channel, top, bottom, column, start, gain, gain_of_mean, moves, channels, n, width, rows,
    PAIRS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Some rows of each map: start + gain * value + gain * local mean, or as it is where it is not moved.

    Two rows at a time, local means are added up in an order that is another for each of the two: `top` must be even.
    """
    gap: tl.constexpr = 1 if LAST else PAIRS
    masks, down = _masks(channel, column, channels, width, gap, EVEN), width * (channels if LAST else 1)
    spots = _spots(channel, column, channels, gap, LAST)
    rule = start[:, None], gain[:, None], gain_of_mean[:, None], moves[:, None]
    above, here, values = enter(x, channel, top, column, channels, n, width, PAIRS, LAST, EVEN)
    row = _row(x, top + 1, channel, column, channels, n, width, LAST)
    shares = _share(column, width), _share(column + gap, width)
    if LAST:
        more, to = residual + top * down, out + top * down
        for y in tl.range(top, bottom - 1, 2, num_stages=_AHEAD):
            one = _six(row, spots, True, masks, LAST)
            two = _six(row + down, spots, y + 2 < rows, masks, LAST)
            more_one = _pair(more, spots, masks[1], masks[4]) if ADD else values
            more_two = _pair(more + down, spots, masks[1], masks[4]) if ADD else values
            below, under = _three(one, LAST), _three(two, LAST)
            between = here[0] + below[0], here[1] + below[1]
            nine = above[0] + between[0], above[1] + between[1]
            _write_row(to, spots, nine, values, shares, _share(y, rows), rule, more_one, masks, ADD, RELU)
            nine = between[0] + under[0], between[1] + under[1]
            _write_row(
                to + down, spots, nine, (one[1], one[4]), shares, _share(y + 1, rows), rule, more_two, masks, ADD, RELU
            )
            above, here, values = below, under, (two[1], two[4])
            row, more, to = row + 2 * down, more + 2 * down, to + 2 * down
        if (bottom - top) % 2 == 1:
            more_one = _pair(more, spots, masks[1], masks[4]) if ADD else values
            nine = above[0] + here[0], above[1] + here[1]
            _write_row(to, spots, nine, values, shares, _share(bottom - 1, rows), rule, more_one, masks, ADD, RELU)
    else:
        following = _six(row, spots, top + 1 < rows, masks, LAST)
        for y in range(top, bottom):
            row += down
            next_but_one = _six(row, spots, (y < bottom - 1) & (y + 2 < rows), masks, LAST)
            more = _row(residual, y, channel, column, channels, n, width, LAST)
            more_one = _pair(more, spots, masks[1], masks[4]) if ADD else values
            to = _row(out, y, channel, column, channels, n, width, LAST)
            below = _three(following, LAST)
            nine = above[0] + (here[0] + below[0]), above[1] + (here[1] + below[1])
            _write_row(to, spots, nine, values, shares, _share(y, rows), rule, more_one, masks, ADD, RELU)
            above, here, values = here, below, (following[1], following[4])
            following = next_but_one


@triton.jit
def _there(pixel, n, masks, GAP: tl.constexpr):
    """Which there are of a pair of pixels, where the last row may be shorter."""
    return masks[1] & (pixel < n)[None, :], masks[4] & (pixel + GAP < n)[None, :]


@triton.jit
def _pair(row, spots, there0, there1):
    """A pair of columns of a row, where there are."""
    return tl.load(row + spots[1], mask=there0, other=0.0), tl.load(row + spots[4], mask=there1, other=0.0)


@triton.jit
def _write_row(to, spots, nine, values, shares, part, rule, more, masks, ADD: tl.constexpr, RELU: tl.constexpr):
    """A row of `write_rows`, of which the sums of nine and the values are given."""
    start, gain, gain_of_mean, moves = rule
    local0, local1 = nine[0] * (shares[0] * part)[None, :], nine[1] * (shares[1] * part)[None, :]
    # What is not moved may have local means that are no numbers.
    new0 = tl.fma(tl.where(moves, local0, 0.0), gain_of_mean, tl.fma(values[0].to(tl.float32), gain, start))
    new1 = tl.fma(tl.where(moves, local1, 0.0), gain_of_mean, tl.fma(values[1].to(tl.float32), gain, start))
    _finish(to + spots[1], new0, more[0], moves, masks[1], ADD, RELU)
    _finish(to + spots[4], new1, more[1], moves, masks[4], ADD, RELU)


@triton.jit
def _finish(out, value, more, moves, inside, ADD: tl.constexpr, RELU: tl.constexpr):
    """What follows in the model, and the result. What is not moved is rounded as if this were done in steps."""
    dtype: tl.constexpr = out.dtype.element_ty
    if dtype == tl.float16:  # a reference may lie beyond what float16 holds
        value = tl.where(moves, tl.minimum(tl.maximum(value, -65504.0), 65504.0), value)
    if ADD:
        value += more.to(tl.float32)
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
