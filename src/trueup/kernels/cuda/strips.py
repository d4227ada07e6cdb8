"""Device functions of the rule of evidence: read, measure and write a vertical strip of maps, row by row.

A program takes some channels of an image and goes down a strip of their maps. Each lane has a pair of columns. If
channels lie last, the two are adjacent and share their neighbours; otherwise they are half a strip apart, so that
adjacent lanes read adjacent columns. A local mean is a sum over three rows; each row's sum over three columns is
computed once.

If channels lie last, two rows are processed at a time, which saves a sum and most register moves, while the next rows
are copied to shared memory. Otherwise neighbours do not lie at aligned addresses, for which such copies are slow. Then
one row is processed at a time, while the next but one is loaded to registers.

Sums are taken of a map minus a *pivot*, the mean of its first values: the mean is not known before the map has been
read, and squares of values far from zero would cancel in float32. If the first values are the share f of a map,
(mean - pivot)² is at most (1 - f) / f variances, so the variance is off by about 1 / f roundings at most.

Constants of the kernels: `MAPS` is the number of channels of a program and `PAIRS` that of column pairs of a strip.
`LAST` says that channels lie last in memory, `BANDS` that maps have a low and a high band, `ALL` that all moments are
computed and not only those that `realign` needs, `ADD` that a residual is added. All other options are arguments,
because every constant doubles the number of kernels that a model has to compile. A ReLU limits the results to `lower`
(0, or minus infinity without a ReLU) and `upper` (6 for a ReLU6, else infinity).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.kernels.cuda.coefficients import variance_of
from trueup.kernels.cuda.elementwise import clamp_to_float16, relu

_STAGES = tl.constexpr(3)  # pairs of rows in the pipeline
_HALVINGS = tl.constexpr(5)  # that reduce 32 numbers, the maximum of column pairs per strip, to one


@triton.jit
def program_tile(channels, parts, MAPS: tl.constexpr):
    """Image, part and channels of this program. All lie along the first axis; the others are limited to 65,535."""
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

    This form takes the fewest registers: offsets per lane from one pointer, or constants from each lane's pointer.
    """
    if LAST:
        at = column[None, :] * channels + channel[:, None]
        offsets = at - channels, at, at + channels, at, at + channels, at + 2 * channels
    else:
        offsets = -1, 0, 1, DISTANCE - 1, DISTANCE, DISTANCE + 1
    return offsets


@triton.jit
def _column_mask(channel, column, channels, width):
    """Mask of the columns and channels that lie inside the maps."""
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
    """State at row `top`: the sums of neighbours in the row above and in row `top`, and the values of row `top`."""
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
    """Mean of the first values, up to 16, of each map."""
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

    They are returned in the low band's places of the result of `sums_with_bands`; the other sums are 0.
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

    These are the sums of the low band, the high band, the squares of each, and with `ALL` also of the squared values
    and of the absolute values of the high band. `state` is that of `start_strip` at `top`.
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
            next_row = _load_neighbours(row, offsets, True, masks, LAST)
            row_after = _load_neighbours(row + down, offsets, y + 2 < rows, masks, LAST)
            row += 2 * down
            below, below_next = _sum_neighbours(next_row, LAST), _sum_neighbours(row_after, LAST)
            middle = here[0] + below[0], here[1] + below[1]
            sums3x3 = above[0] + middle[0], above[1] + middle[1]
            sums = _add_row(sums, sums3x3, values, weights, centres, _neighbour_weight(y, rows), ALL)
            sums3x3 = middle[0] + below_next[0], middle[1] + below_next[1]
            sums = _add_row(
                sums, sums3x3, (next_row[1], next_row[4]), weights, centres, _neighbour_weight(y + 1, rows), ALL
            )
            above, here, values = below, below_next, (row_after[1], row_after[4])
        if (bottom - top) % 2 == 1:  # the last row of a map, after an even number of rows
            sums3x3 = above[0] + here[0], above[1] + here[1]
            sums = _add_row(sums, sums3x3, values, weights, centres, _neighbour_weight(bottom - 1, rows), ALL)
    else:
        following = _load_neighbours(row, offsets, top + 1 < rows, masks, LAST)
        for y in range(top, bottom):
            row += down
            next_but_one = _load_neighbours(row, offsets, (y < bottom - 1) & (y + 2 < rows), masks, LAST)
            below = _sum_neighbours(following, LAST)
            sums3x3 = above[0] + (here[0] + below[0]), above[1] + (here[1] + below[1])
            sums = _add_row(sums, sums3x3, values, weights, centres, _neighbour_weight(y, rows), ALL)
            above, here, values = here, below, (following[1], following[4])
            following = next_but_one
    low, high, low2, high2, square, rough = sums
    sums = (
        _sum_lanes(low), _sum_lanes(high), _sum_lanes(low2), _sum_lanes(high2),
        _sum_lanes(square), _sum_lanes(rough),
    )  # fmt: skip
    return sums, (above, here, values)


@triton.jit
def _add_row(sums, sums3x3, values, weights, centres, row_weight, ALL: tl.constexpr):
    """Add a row to the sums of `sums_with_bands`. `sums3x3` are sums over 3 x 3 neighbourhoods."""
    low, high, low2, high2, square, rough = sums
    weight0, weight1 = (weights[0] * row_weight)[None, :], (weights[1] * row_weight)[None, :]
    smooth0, smooth1 = tl.fma(sums3x3[0], weight0, -centres[0]), tl.fma(sums3x3[1], weight1, -centres[1])
    sharp0 = tl.fma(sums3x3[0], -weight0, values[0].to(tl.float32))
    sharp1 = tl.fma(sums3x3[1], -weight1, values[1].to(tl.float32))
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
    x, residual, out, channel, top, bottom, column, start, gain, moves, lower, upper, channels, n, width,
    PAIRS: tl.constexpr, LAST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write rows `top` to `bottom - 1` as start + gain * value."""
    distance: tl.constexpr = 1 if LAST else PAIRS
    masks = _neighbour_masks(channel, column, channels, width, distance)
    offsets = _neighbour_offsets(channel, column, channels, distance, LAST)
    for y in tl.range(top, bottom, loop_unroll_factor=2):
        mask0, mask1 = _pixel_masks(y * width + column, n, masks, distance)
        row = _row_pointer(x, y, channel, column, channels, n, width, LAST)
        residual_row = _row_pointer(residual, y, channel, column, channels, n, width, LAST)
        out_row = _row_pointer(out, y, channel, column, channels, n, width, LAST)
        value0, value1 = _load_pair(row, offsets, mask0, mask1)
        added0, added1 = _load_pair(residual_row, offsets, mask0, mask1) if ADD else (value0, value1)
        new0 = tl.fma(value0.to(tl.float32), gain[:, None], start[:, None])
        new1 = tl.fma(value1.to(tl.float32), gain[:, None], start[:, None])
        _store(out_row + offsets[1], new0, added0, moves[:, None], lower, upper, mask0, ADD)
        _store(out_row + offsets[4], new1, added1, moves[:, None], lower, upper, mask1, ADD)


@triton.jit
def write_with_bands(
    x, residual, out, channel, top, bottom, column, start, gain, gain_of_mean, moves,
    lower, upper, channels, n, width, rows,
    PAIRS: tl.constexpr, LAST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write rows `top` to `bottom - 1` as start + gain * value + gain_of_mean * local mean.

    `top` must be even: the two rows of a step sum their local means in different orders.
    """
    distance: tl.constexpr = 1 if LAST else PAIRS
    masks, down = _neighbour_masks(channel, column, channels, width, distance), width * (channels if LAST else 1)
    offsets = _neighbour_offsets(channel, column, channels, distance, LAST)
    rule = start[:, None], gain[:, None], gain_of_mean[:, None], moves[:, None], lower, upper
    above, here, values = start_strip(x, channel, top, column, channels, n, width, PAIRS, LAST)
    row = _row_pointer(x, top + 1, channel, column, channels, n, width, LAST)
    weights = _neighbour_weight(column, width), _neighbour_weight(column + distance, width)
    if LAST:
        residual_row, out_row = residual + top * down, out + top * down
        for y in tl.range(top, bottom - 1, 2, num_stages=_STAGES):
            next_row = _load_neighbours(row, offsets, True, masks, LAST)
            row_after = _load_neighbours(row + down, offsets, y + 2 < rows, masks, LAST)
            added = _load_pair(residual_row, offsets, masks[1], masks[4]) if ADD else values
            added_next = _load_pair(residual_row + down, offsets, masks[1], masks[4]) if ADD else values
            below, below_next = _sum_neighbours(next_row, LAST), _sum_neighbours(row_after, LAST)
            middle = here[0] + below[0], here[1] + below[1]
            sums3x3 = above[0] + middle[0], above[1] + middle[1]
            weight = _neighbour_weight(y, rows)
            _write_row(out_row, offsets, sums3x3, values, weights, weight, rule, added, masks, ADD)
            sums3x3 = middle[0] + below_next[0], middle[1] + below_next[1]
            weight = _neighbour_weight(y + 1, rows)
            _write_row(
                out_row + down,
                offsets,
                sums3x3,
                (next_row[1], next_row[4]),
                weights,
                weight,
                rule,
                added_next,
                masks,
                ADD,
            )
            above, here, values = below, below_next, (row_after[1], row_after[4])
            row, residual_row, out_row = row + 2 * down, residual_row + 2 * down, out_row + 2 * down
        if (bottom - top) % 2 == 1:
            added = _load_pair(residual_row, offsets, masks[1], masks[4]) if ADD else values
            sums3x3 = above[0] + here[0], above[1] + here[1]
            weight = _neighbour_weight(bottom - 1, rows)
            _write_row(out_row, offsets, sums3x3, values, weights, weight, rule, added, masks, ADD)
    else:
        following = _load_neighbours(row, offsets, top + 1 < rows, masks, LAST)
        for y in range(top, bottom):
            row += down
            next_but_one = _load_neighbours(row, offsets, (y < bottom - 1) & (y + 2 < rows), masks, LAST)
            residual_row = _row_pointer(residual, y, channel, column, channels, n, width, LAST)
            added = _load_pair(residual_row, offsets, masks[1], masks[4]) if ADD else values
            out_row = _row_pointer(out, y, channel, column, channels, n, width, LAST)
            below = _sum_neighbours(following, LAST)
            sums3x3 = above[0] + (here[0] + below[0]), above[1] + (here[1] + below[1])
            weight = _neighbour_weight(y, rows)
            _write_row(out_row, offsets, sums3x3, values, weights, weight, rule, added, masks, ADD)
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
def _write_row(out_row, offsets, sums3x3, values, weights, row_weight, rule, added, masks, ADD: tl.constexpr):
    """Write one row of `write_with_bands`. `sums3x3` are sums over 3 x 3 neighbourhoods."""
    start, gain, gain_of_mean, moves, lower, upper = rule
    local0, local1 = sums3x3[0] * (weights[0] * row_weight)[None, :], sums3x3[1] * (weights[1] * row_weight)[None, :]
    # Local means of maps that are not moved may be NaN.
    new0 = tl.fma(tl.where(moves, local0, 0.0), gain_of_mean, tl.fma(values[0].to(tl.float32), gain, start))
    new1 = tl.fma(tl.where(moves, local1, 0.0), gain_of_mean, tl.fma(values[1].to(tl.float32), gain, start))
    _store(out_row + offsets[1], new0, added[0], moves, lower, upper, masks[1], ADD)
    _store(out_row + offsets[4], new1, added[1], moves, lower, upper, masks[4], ADD)


@triton.jit
def _store(out, value, added, moves, lower, upper, inside, ADD: tl.constexpr):
    """Add the residual, limit the sum, and store. Unmoved values are rounded as by torch's separate steps."""
    dtype: tl.constexpr = out.dtype.element_ty
    if dtype == tl.float16:  # a reference may lie outside float16's range
        value = tl.where(moves, clamp_to_float16(value), value)
    if ADD:
        value += added.to(tl.float32)
    value = tl.maximum(value, lower, propagate_nan=tl.PropagateNan.ALL)
    value = tl.minimum(value, upper, propagate_nan=tl.PropagateNan.ALL)
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
