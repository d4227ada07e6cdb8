"""Device functions of the rule of evidence for maps without bands that fit into registers.

They load all rows of a map at once and keep them, where `strips` goes down a map twice, row by row. For a single image,
a kernel mostly waits for loads, one after the other: here there is one such wait. In batches, so many registers would
leave room for few programs. Sums are added up in the order of `strips.sums_without_bands`, to the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.kernels.cuda.strips import (
    load_pair,
    neighbour_masks,
    neighbour_offsets,
    pixel_masks,
    row_pointer,
    store_realigned,
    sum_lanes,
)


@triton.jit
def load_rows(
    x, channel, column, channels, n, width,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Load the first `ROWS` rows of some maps: pairs of columns, one after the other; 0 outside the maps."""
    distance: tl.constexpr = 1 if LAST else PAIRS
    masks = neighbour_masks(channel, column, channels, width, distance)
    offsets = neighbour_offsets(channel, column, channels, distance, LAST)
    values = ()  # one pair after the other
    for y in tl.static_range(ROWS):
        mask0, mask1 = pixel_masks(y * width + column, n, masks, distance)
        value0, value1 = load_pair(row_pointer(x, y, channel, column, channels, n, width, LAST), offsets, mask0, mask1)
        values += (value0, value1)  # type: ignore[assignment]
    return values


@triton.jit
def sums_of_rows(
    values, channel, column, pivot, channels, n, width,
    MAPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Sums of the values minus the pivot, and of their squares."""
    distance: tl.constexpr = 1 if LAST else PAIRS
    masks = neighbour_masks(channel, column, channels, width, distance)
    low, low2 = tl.zeros([MAPS, PAIRS], tl.float32), tl.zeros([MAPS, PAIRS], tl.float32)
    for y in tl.static_range(ROWS):
        mask0, mask1 = pixel_masks(y * width + column, n, masks, distance)
        away0 = tl.where(mask0, values[2 * y].to(tl.float32) - pivot[:, None], 0.0)
        away1 = tl.where(mask1, values[2 * y + 1].to(tl.float32) - pivot[:, None], 0.0)
        low += away0 + away1
        low2 = tl.fma(away1, away1, tl.fma(away0, away0, low2))
    return sum_lanes(low), sum_lanes(low2)


@triton.jit
def write_held(
    values, added, out, channel, column, start, gain, moves, lower, upper, channels, n, width,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write the rows as start + gain * value, plus the rows that are `added`."""
    distance: tl.constexpr = 1 if LAST else PAIRS
    masks = neighbour_masks(channel, column, channels, width, distance)
    offsets = neighbour_offsets(channel, column, channels, distance, LAST)
    for y in tl.static_range(ROWS):
        mask0, mask1 = pixel_masks(y * width + column, n, masks, distance)
        row = row_pointer(out, y, channel, column, channels, n, width, LAST)
        new0 = tl.fma(values[2 * y].to(tl.float32), gain[:, None], start[:, None])
        new1 = tl.fma(values[2 * y + 1].to(tl.float32), gain[:, None], start[:, None])
        store_realigned(row + offsets[1], new0, added[2 * y], moves[:, None], lower, upper, mask0, ADD)
        store_realigned(row + offsets[4], new1, added[2 * y + 1], moves[:, None], lower, upper, mask1, ADD)
