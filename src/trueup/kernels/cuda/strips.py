"""Device functions of the rule of evidence: read, measure and write a vertical strip of maps, row by row.

A program takes some channels of an image and goes down a strip of their maps. Each lane has a pair of columns. If
channels lie last, the two are adjacent and share their neighbours; otherwise they are half a strip apart, so that
adjacent lanes read adjacent columns. A local mean is a sum over three rows, of which each is a sum over three columns
that is computed once per row.

If channels lie last, two rows are done at a time, which saves a sum and most register moves, while the next rows are
copied to shared memory. Otherwise neighbours do not lie at aligned addresses, for which such copies are slow; one row
is done at a time, while the next but one is loaded to registers.

Sums are taken of a map minus a *pivot*, the mean of its first values: the mean is not known before the map has been
read, and squares of values far from zero would cancel in float32. If the first values are the share f of a map,
(mean - pivot)² is at most (1 - f) / f variances, so the variance is off by about 1 / f roundings at most.

Constants of the kernels: `MAPS` is the number of channels of a program and `PAIRS` that of column pairs of a strip.
`LAST` says that channels lie last in memory, `BANDS` that maps have a low and a high band, `ALL` that all moments are
wanted and not only those that `realign` needs, `ADD` that a residual is added. What else a call may ask for is an
argument: every constant doubles the number of kernels that a model has to compile. A ReLU is the limits of the results,
`least` and `most`: 0 or minus infinity, and infinity or 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.kernels.cuda.coefficients import variance_of
from trueup.kernels.cuda.elementwise import clamp_to_float16, relu

_STAGES = tl.constexpr(3)  # pairs of rows in the pipeline
_HALVINGS = tl.constexpr(5)  # of 32 numbers, the most pairs of columns that a strip has


@triton.jit
def program_tile(channels, parts, MAPS: tl.constexpr):
    """Image, part and channels of this program, all along one axis, because the others end at 65,535."""
    tiles = tl.cdiv(channels, MAPS)
    above = tl.program_id(0) // tiles
    image = above // parts
    channel = (tl.program_id(0) - above * tiles) * MAPS + tl.arange(0, MAPS)
    return image.to(tl.int64), above - image * parts, channel


@triton.jit
def first_columns(strip, PAIRS: tl.constexpr, LAST: tl.constexpr):
    """First column of each pair of a strip."""
    return strip * 2 * PAIRS + (2 if LAST else 1) * tl.arange(0, PAIRS)


@triton.jit
def _row_pointer(x, y, channel, column, channels, n, width, LAST: tl.constexpr):
    """Pointer to row `y`: one for all maps if channels lie last, otherwise one per lane."""
    return x + (y * width * channels if LAST else channel[:, None] * n + (y * width + column)[None, :])


@triton.jit
def _neighbour_offsets(channel, column, channels, DISTANCE: tl.constexpr, LAST: tl.constexpr):
    """Offsets from `_row_pointer` of the left neighbour, the column and the right neighbour, for a pair of columns.

    The form needs the fewest registers: per lane from one pointer, or constants from each lane's own pointer.
    """
    if LAST:
        at = column[None, :] * channels + channel[:, None]
        offsets = at - channels, at, at + channels, at, at + channels, at + 2 * channels
    else:
        offsets = -1, 0, 1, DISTANCE - 1, DISTANCE, DISTANCE + 1
    return offsets


@triton.jit
def _column_mask(channel, column, channels, width):
    """Mask of the columns, and channels, that lie inside the maps."""
    return ((column >= 0) & (column < width))[None, :] & (channel < channels)[:, None]


@triton.jit
def _neighbour_masks(channel, column, channels, width, DISTANCE: tl.constexpr):
    """Masks of the columns of `_neighbour_offsets` that lie inside the map."""
    return (
        _column_mask(channel, column - 1, channels, width),
        _column_mask(channel, column, channels, width),
        _column_mask(channel, column + 1, channels, width),
        _column_mask(channel, column + DISTANCE - 1, channels, width),
        _column_mask(channel, column + DISTANCE, channels, width),
        _column_mask(channel, column + DISTANCE + 1, channels, width),
    )


@triton.jit
def _load_neighbours(row, offsets, row_exists, masks, LAST: tl.constexpr):
    """Load the columns of `_neighbour_offsets` in a row; 0 outside the map or if the row does not exist."""
    a = tl.load(row + offsets[0], mask=masks[0] & row_exists, other=0.0)
    b = tl.load(row + offsets[1], mask=masks[1] & row_exists, other=0.0)
    c = tl.load(row + offsets[2], mask=masks[2] & row_exists, other=0.0)
    f = tl.load(row + offsets[5], mask=masks[5] & row_exists, other=0.0)
    if LAST:
        return a, b, c, b, c, f
    d = tl.load(row + offsets[3], mask=masks[3] & row_exists, other=0.0)
    e = tl.load(row + offsets[4], mask=masks[4] & row_exists, other=0.0)
    return a, b, c, d, e, f


@triton.jit
def _sum_neighbours(row, LAST: tl.constexpr):
    """Sum of each column of a pair and its two neighbours."""
    a, b, c, d, e, f = row
    if LAST:
        pair = b.to(tl.float32) + c.to(tl.float32)
        return a.to(tl.float32) + pair, pair + f.to(tl.float32)
    before, after = a.to(tl.float32) + c.to(tl.float32), d.to(tl.float32) + f.to(tl.float32)
    return before + b.to(tl.float32), after + e.to(tl.float32)


@triton.jit
def start_strip(
    x, channel, top, column, channels, n, width,
    PAIRS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """State above row `top`: the sums of neighbours in the row above and in row `top`, and the values of row `top`."""
    distance: tl.constexpr = 1 if LAST else PAIRS  # between a pair's columns
    masks = _neighbour_masks(channel, column, channels, width, distance)
    offsets = _neighbour_offsets(channel, column, channels, distance, LAST)
    row = _row_pointer(x, top, channel, column, channels, n, width, LAST)
    above = _load_neighbours(row - width * (channels if LAST else 1), offsets, top > 0, masks, LAST)
    first = _load_neighbours(row, offsets, True, masks, LAST)
    return _sum_neighbours(above, LAST), _sum_neighbours(first, LAST), (first[1], first[4])


@triton.jit
def _neighbour_weight(at, length):
    """Weight of each pixel in the mean of a pixel and its neighbours along one side of a map; 0 outside the map."""
    before, after = at > 0, at < length - 1
    return tl.where(before & after, 1 / 3, tl.where(before | after, tl.where(at < length, 0.5, 0.0), 1.0))


@triton.jit
def pivot_of(x, channel, channels, n, width, LAST: tl.constexpr):
    """Mean of up to 16 first values of each map."""
    column, count = tl.arange(0, 16), tl.minimum(tl.minimum(width, n), 16)
    inside = _column_mask(channel, column, channels, count)
    offsets = _neighbour_offsets(channel, column, channels, 1, LAST)
    first = tl.load(_row_pointer(x, 0, channel, column, channels, n, width, LAST) + offsets[1], mask=inside, other=0.0)
    return _sum_lanes(first.to(tl.float32)) / count


@triton.jit
def _sum_lanes(lanes):
    """Sum along the second axis, whose length is a power of two, always in the same order.

    The order of `tl.sum` depends on the number of threads and on the kernel around it.
    """
    for _ in tl.static_range(_HALVINGS):
        if lanes.shape[1] > 1:
            first, second = tl.split(tl.reshape(lanes, [lanes.shape[0], lanes.shape[1] // 2, 2]))
            lanes = first + second
    return tl.reshape(lanes, [lanes.shape[0]])


@triton.jit
def sums_without_bands(
    x, channel, top, bottom, column, pivot, channels, n, width,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Sums over rows `top` to `bottom - 1` of the values minus the pivot, and of their squares.

    They take the low band's places in the result of `sums_with_bands`; the others are 0.
    """
    distance: tl.constexpr = 1 if LAST else PAIRS  # between a pair's columns
    masks = _neighbour_masks(channel, column, channels, width, distance)
    offsets = _neighbour_offsets(channel, column, channels, distance, LAST)
    low, low2 = tl.zeros([MAPS, PAIRS], tl.float32), tl.zeros([MAPS, PAIRS], tl.float32)
    for y in tl.range(top, bottom, loop_unroll_factor=2):
        mask0, mask1 = _pixel_masks(y * width + column, n, masks, distance)
        row = _row_pointer(x, y, channel, column, channels, n, width, LAST)
        value0, value1 = _load_pair(row, offsets, mask0, mask1)
        away0 = tl.where(mask0, value0.to(tl.float32) - pivot[:, None], 0.0)
        away1 = tl.where(mask1, value1.to(tl.float32) - pivot[:, None], 0.0)
        low += away0 + away1
        low2 = tl.fma(away1, away1, tl.fma(away0, away0, low2))
    none = tl.zeros([MAPS], tl.float32)
    return _sum_lanes(low), none, _sum_lanes(low2), none, none, none


@triton.jit
def sums_with_bands(
    x, state, channel, top, bottom, column, pivot, channels, n, width, rows,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Sums over rows `top` to `bottom - 1` of maps minus their pivot, and the state at `bottom`.

    The sums are those of the low band, the high band, the squares of each, and with `ALL` also the squares of the
    values and the absolute values of the high band. `state` is that of `start_strip` at `top`.
    """
    distance: tl.constexpr = 1 if LAST else PAIRS
    masks, down = _neighbour_masks(channel, column, channels, width, distance), width * (channels if LAST else 1)
    offsets = _neighbour_offsets(channel, column, channels, distance, LAST)
    nothing = tl.zeros([MAPS, PAIRS], tl.float32)
    above, here, values = state
    row = _row_pointer(x, top + 1, channel, column, channels, n, width, LAST)
    weights = _neighbour_weight(column, width), _neighbour_weight(column + distance, width)
    centres = tl.where(masks[1], pivot[:, None], 0.0), tl.where(masks[4], pivot[:, None], 0.0)
    sums = nothing, nothing, nothing, nothing, nothing, nothing
    if LAST:
        for y in tl.range(top, bottom - 1, 2, num_stages=_STAGES):
            one = _load_neighbours(row, offsets, True, masks, LAST)
            two = _load_neighbours(row + down, offsets, y + 2 < rows, masks, LAST)
            row += 2 * down
            below, under = _sum_neighbours(one, LAST), _sum_neighbours(two, LAST)
            between = here[0] + below[0], here[1] + below[1]
            nine = above[0] + between[0], above[1] + between[1]
            sums = _add_row(sums, nine, values, weights, centres, _neighbour_weight(y, rows), ALL)
            nine = between[0] + under[0], between[1] + under[1]
            sums = _add_row(sums, nine, (one[1], one[4]), weights, centres, _neighbour_weight(y + 1, rows), ALL)
            above, here, values = below, under, (two[1], two[4])
        if (bottom - top) % 2 == 1:  # the last row of a map, after an even number of rows
            nine = above[0] + here[0], above[1] + here[1]
            sums = _add_row(sums, nine, values, weights, centres, _neighbour_weight(bottom - 1, rows), ALL)
    else:
        following = _load_neighbours(row, offsets, top + 1 < rows, masks, LAST)
        for y in range(top, bottom):
            row += down
            next_but_one = _load_neighbours(row, offsets, (y < bottom - 1) & (y + 2 < rows), masks, LAST)
            below = _sum_neighbours(following, LAST)
            nine = above[0] + (here[0] + below[0]), above[1] + (here[1] + below[1])
            sums = _add_row(sums, nine, values, weights, centres, _neighbour_weight(y, rows), ALL)
            above, here, values = here, below, (following[1], following[4])
            following = next_but_one
    low, high, low2, high2, square, rough = sums
    sums = (
        _sum_lanes(low), _sum_lanes(high), _sum_lanes(low2), _sum_lanes(high2),
        _sum_lanes(square), _sum_lanes(rough),
    )  # fmt: skip
    return sums, (above, here, values)


@triton.jit
def _add_row(sums, nine, values, weights, centres, row_weight, ALL: tl.constexpr):
    """Add a row to the sums of `sums_with_bands`. `nine` are sums over 3 x 3 neighbourhoods."""
    low, high, low2, high2, square, rough = sums
    weight0, weight1 = (weights[0] * row_weight)[None, :], (weights[1] * row_weight)[None, :]
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
def write_without_bands(
    x, residual, out, channel, top, bottom, column, start, gain, moves, least, most, channels, n, width,
    PAIRS: tl.constexpr, LAST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write rows `top` to `bottom - 1` as start + gain * value."""
    distance: tl.constexpr = 1 if LAST else PAIRS
    masks = _neighbour_masks(channel, column, channels, width, distance)
    offsets = _neighbour_offsets(channel, column, channels, distance, LAST)
    for y in tl.range(top, bottom, loop_unroll_factor=2):
        mask0, mask1 = _pixel_masks(y * width + column, n, masks, distance)
        row = _row_pointer(x, y, channel, column, channels, n, width, LAST)
        beside = _row_pointer(residual, y, channel, column, channels, n, width, LAST)
        to = _row_pointer(out, y, channel, column, channels, n, width, LAST)
        value0, value1 = _load_pair(row, offsets, mask0, mask1)
        added0, added1 = _load_pair(beside, offsets, mask0, mask1) if ADD else (value0, value1)
        new0 = tl.fma(value0.to(tl.float32), gain[:, None], start[:, None])
        new1 = tl.fma(value1.to(tl.float32), gain[:, None], start[:, None])
        _store(to + offsets[1], new0, added0, moves[:, None], least, most, mask0, ADD)
        _store(to + offsets[4], new1, added1, moves[:, None], least, most, mask1, ADD)


@triton.jit
def write_with_bands(
    x, residual, out, channel, top, bottom, column, start, gain, gain_of_mean, moves,
    least, most, channels, n, width, rows,
    PAIRS: tl.constexpr, LAST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write rows `top` to `bottom - 1` as start + gain * value + gain_of_mean * local mean.

    `top` must be even: of two rows done at a time, each adds up its local means in another order.
    """
    distance: tl.constexpr = 1 if LAST else PAIRS
    masks, down = _neighbour_masks(channel, column, channels, width, distance), width * (channels if LAST else 1)
    offsets = _neighbour_offsets(channel, column, channels, distance, LAST)
    rule = start[:, None], gain[:, None], gain_of_mean[:, None], moves[:, None], least, most
    above, here, values = start_strip(x, channel, top, column, channels, n, width, PAIRS, LAST)
    row = _row_pointer(x, top + 1, channel, column, channels, n, width, LAST)
    weights = _neighbour_weight(column, width), _neighbour_weight(column + distance, width)
    if LAST:
        beside, to = residual + top * down, out + top * down
        for y in tl.range(top, bottom - 1, 2, num_stages=_STAGES):
            one = _load_neighbours(row, offsets, True, masks, LAST)
            two = _load_neighbours(row + down, offsets, y + 2 < rows, masks, LAST)
            added_one = _load_pair(beside, offsets, masks[1], masks[4]) if ADD else values
            added_two = _load_pair(beside + down, offsets, masks[1], masks[4]) if ADD else values
            below, under = _sum_neighbours(one, LAST), _sum_neighbours(two, LAST)
            between = here[0] + below[0], here[1] + below[1]
            nine = above[0] + between[0], above[1] + between[1]
            weight = _neighbour_weight(y, rows)
            _write_row(to, offsets, nine, values, weights, weight, rule, added_one, masks, ADD)
            nine = between[0] + under[0], between[1] + under[1]
            weight = _neighbour_weight(y + 1, rows)
            _write_row(to + down, offsets, nine, (one[1], one[4]), weights, weight, rule, added_two, masks, ADD)
            above, here, values = below, under, (two[1], two[4])
            row, beside, to = row + 2 * down, beside + 2 * down, to + 2 * down
        if (bottom - top) % 2 == 1:
            added_one = _load_pair(beside, offsets, masks[1], masks[4]) if ADD else values
            nine = above[0] + here[0], above[1] + here[1]
            weight = _neighbour_weight(bottom - 1, rows)
            _write_row(to, offsets, nine, values, weights, weight, rule, added_one, masks, ADD)
    else:
        following = _load_neighbours(row, offsets, top + 1 < rows, masks, LAST)
        for y in range(top, bottom):
            row += down
            next_but_one = _load_neighbours(row, offsets, (y < bottom - 1) & (y + 2 < rows), masks, LAST)
            beside = _row_pointer(residual, y, channel, column, channels, n, width, LAST)
            added_one = _load_pair(beside, offsets, masks[1], masks[4]) if ADD else values
            to = _row_pointer(out, y, channel, column, channels, n, width, LAST)
            below = _sum_neighbours(following, LAST)
            nine = above[0] + (here[0] + below[0]), above[1] + (here[1] + below[1])
            weight = _neighbour_weight(y, rows)
            _write_row(to, offsets, nine, values, weights, weight, rule, added_one, masks, ADD)
            above, here, values = here, below, (following[1], following[4])
            following = next_but_one


@triton.jit
def _pixel_masks(pixel, n, masks, DISTANCE: tl.constexpr):
    """Masks of the pixels of a pair that exist; the last row may be shorter than the others."""
    return masks[1] & (pixel < n)[None, :], masks[4] & (pixel + DISTANCE < n)[None, :]


@triton.jit
def _load_pair(row, offsets, mask0, mask1):
    """Load both columns of a pair in a row."""
    return tl.load(row + offsets[1], mask=mask0, other=0.0), tl.load(row + offsets[4], mask=mask1, other=0.0)


@triton.jit
def _write_row(to, offsets, nine, values, weights, row_weight, rule, added, masks, ADD: tl.constexpr):
    """Write one row of `write_with_bands`. `nine` are sums over 3 x 3 neighbourhoods."""
    start, gain, gain_of_mean, moves, least, most = rule
    local0, local1 = nine[0] * (weights[0] * row_weight)[None, :], nine[1] * (weights[1] * row_weight)[None, :]
    # Local means of maps that are not moved may be NaN.
    new0 = tl.fma(tl.where(moves, local0, 0.0), gain_of_mean, tl.fma(values[0].to(tl.float32), gain, start))
    new1 = tl.fma(tl.where(moves, local1, 0.0), gain_of_mean, tl.fma(values[1].to(tl.float32), gain, start))
    _store(to + offsets[1], new0, added[0], moves, least, most, masks[1], ADD)
    _store(to + offsets[4], new1, added[1], moves, least, most, masks[4], ADD)


@triton.jit
def _store(out, value, added, moves, least, most, inside, ADD: tl.constexpr):
    """Add the residual, limit the sum, and store. Unmoved values are rounded as if this were done in steps."""
    dtype: tl.constexpr = out.dtype.element_ty
    if dtype == tl.float16:  # a reference may lie outside float16's range
        value = tl.where(moves, clamp_to_float16(value), value)
    if ADD:
        value += added.to(tl.float32)
    value = tl.maximum(value, least, propagate_nan=tl.PropagateNan.ALL)
    value = tl.minimum(value, most, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out, value.to(dtype), mask=inside)


@triton.jit
def store_moments(
    found, image, channel, pivot, low, high, low2, high2, square, rough, channels, n, BANDS: tl.constexpr
):
    """Store `evidence.moments`, from the sums of a map minus its pivot."""
    inside = channel < channels
    found += image * (5 if BANDS else 2) * channels + channel
    tl.store(found, pivot + (low + high) / n, mask=inside)
    if BANDS:
        tl.store(found + channels, relu(variance_of(square, low + high, n)), mask=inside)
        tl.store(found + 2 * channels, relu(variance_of(low2, low, n)), mask=inside)
        tl.store(found + 3 * channels, relu(variance_of(high2, high, n)), mask=inside)
        tl.store(found + 4 * channels, rough / n, mask=inside)
    else:
        tl.store(found + channels, relu(variance_of(low2, low + high, n)), mask=inside)
