"""Kernels of the rule of evidence: sum over maps, then write them. Small maps take a single launch.

`strips` has the device functions that process a strip of maps, and `maps` divides the work among programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.kernels.cuda.coefficients import coefficients, load_reference
from trueup.kernels.cuda.elementwise import scale_and_shift
from trueup.kernels.cuda.launch import wait_for_previous_kernel
from trueup.kernels.cuda.strips import (
    first_columns,
    pivot_of,
    program_tile,
    start_strip,
    store_moments,
    sums_with_bands,
    sums_without_bands,
    write_with_bands,
    write_without_bands,
)

# Triton must not compile special code for these arguments where they are 1 or a multiple of 16: a model has maps of
# many sizes, and the order of summation must not depend on them.
_MAP_SIZES = ["units", "n", "width", "rows", "strips", "segments"]
_WHOLE_SIZES = [*_MAP_SIZES, "rows_per_segment"]
_REALIGN_SIZES = [*_WHOLE_SIZES, "gated", "normed"]
_SUM_SIZES = [*_WHOLE_SIZES, "segments_per_program"]
_WRITE_SIZES = [*_MAP_SIZES, "gated", "normed", "rows_written"]


@triton.jit(do_not_specialize=_REALIGN_SIZES)
def realign_whole(
    x, reference, gates, residual, out, norm_mean, norm_variance, norm_weight, norm_bias, epsilon,
    gated, normed, lower, upper, units, n, width, rows, strips, rows_per_segment, segments,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, UNIT: tl.constexpr, LAST: tl.constexpr,
    BANDS: tl.constexpr, EARLY: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    channels = units * UNIT
    image, _part, channel = program_tile(channels, 1, MAPS)
    begin = image * channels * n
    x, residual, out = x + begin, residual + begin, out + begin
    gate = tl.load(gates + image * gated)
    wanted = tl.where(gate > 0, segments, 0)  # closed images are not measured
    pivot, low, high, low2, high2, _, _ = _sum_all_segments(
        x, channel, channels, n, width, rows, strips, rows_per_segment, wanted, MAPS, PAIRS, LAST, BANDS, False
    )
    known = load_reference(reference, channel, channels, BANDS)
    scale, shift = scale_and_shift(norm_mean, norm_variance, norm_weight, norm_bias, epsilon, channel, channels, normed)
    start, gain, gain_of_mean, moves = coefficients(known, gate, pivot, low, high, low2, high2, scale, shift, n, BANDS)
    for done in range(segments):  # backwards: the rows read last may still be in the cache
        top, bottom, column = _segment_bounds(segments - 1 - done, rows, strips, rows_per_segment, PAIRS, LAST)
        _write_strip(
            x, residual, out, channel, top, bottom, column, start, gain, gain_of_mean, moves,
            lower, upper,
            channels, n, width, rows, PAIRS, LAST, BANDS, ADD,
        )  # fmt: skip


@triton.jit(do_not_specialize=_WHOLE_SIZES)
def measure_whole(
    x, found, units, n, width, rows, strips, rows_per_segment, segments,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, UNIT: tl.constexpr, LAST: tl.constexpr,
    BANDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    channels = units * UNIT
    image, _part, channel = program_tile(channels, 1, MAPS)
    x += image * channels * n
    pivot, low, high, low2, high2, square, rough = _sum_all_segments(
        x, channel, channels, n, width, rows, strips, rows_per_segment, segments, MAPS, PAIRS, LAST, BANDS, True
    )
    store_moments(found, image, channel, pivot, low, high, low2, high2, square, rough, channels, n, BANDS)


@triton.jit
def _sum_all_segments(
    x, channel, channels, n, width, rows, strips, rows_per_segment, segments,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,
    BANDS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Pivot, and sums of `sums_with_bands` over all segments."""
    pivot = pivot_of(x, channel, channels, n, width, LAST)
    nothing = tl.zeros([MAPS], tl.float32)
    low, high, low2, high2, square, rough = nothing, nothing, nothing, nothing, nothing, nothing
    for segment in range(segments):
        top, bottom, column = _segment_bounds(segment, rows, strips, rows_per_segment, PAIRS, LAST)
        if BANDS:
            state = start_strip(x, channel, top, column, channels, n, width, PAIRS, LAST)
            sums, _ = sums_with_bands(
                x, state, channel, top, bottom, column, pivot, channels, n, width, rows,
                MAPS, PAIRS, LAST, ALL,
            )  # fmt: skip
        else:
            sums = sums_without_bands(
                x, channel, top, bottom, column, pivot, channels, n, width, MAPS, PAIRS, LAST
            )  # fmt: skip
        low, high, low2, high2 = low + sums[0], high + sums[1], low2 + sums[2], high2 + sums[3]
        square, rough = square + sums[4], rough + sums[5]
    return pivot, low, high, low2, high2, square, rough


@triton.jit
def _segment_bounds(segment, rows, strips, rows_per_segment, PAIRS: tl.constexpr, LAST: tl.constexpr):
    """First row of a segment, the row after its last, and the first column of each pair."""
    part = segment // strips
    top = part * rows_per_segment
    return top, tl.minimum(top + rows_per_segment, rows), first_columns(segment - part * strips, PAIRS, LAST)


@triton.jit(do_not_specialize=_SUM_SIZES)
def sum_segments(
    x, sums, units, n, width, rows, strips, rows_per_segment, segments, segments_per_program,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, UNIT: tl.constexpr, LAST: tl.constexpr,
    BANDS: tl.constexpr, EARLY: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Store the sums of `segments_per_program` segments of a strip, one below the other."""
    wait_for_previous_kernel(EARLY)
    channels = units * UNIT
    kept: tl.constexpr = 7 if ALL else 5
    parts = strips * tl.cdiv(segments // strips, segments_per_program)
    image, part, channel = program_tile(channels, parts, MAPS)
    x += image * channels * n
    pivot = pivot_of(x, channel, channels, n, width, LAST)
    inside = channel < channels
    above = part // strips  # programs further up in the same strip
    strip, first = part - above * strips, above * segments_per_program
    column = first_columns(strip, PAIRS, LAST)
    if BANDS:
        state = start_strip(x, channel, first * rows_per_segment, column, channels, n, width, PAIRS, LAST)
    sums += (image * segments + first * strips + strip) * kept * channels + channel
    for segment in range(first, tl.minimum(first + segments_per_program, segments // strips)):
        top = segment * rows_per_segment
        bottom = tl.minimum(top + rows_per_segment, rows)
        if BANDS:
            found, state = sums_with_bands(
                x, state, channel, top, bottom, column, pivot, channels, n, width, rows,
                MAPS, PAIRS, LAST, ALL,
            )  # fmt: skip
        else:
            found = sums_without_bands(
                x, channel, top, bottom, column, pivot, channels, n, width, MAPS, PAIRS, LAST
            )  # fmt: skip
        tl.store(sums, pivot, mask=inside)
        for k in tl.static_range(kept - 1):
            tl.store(sums + (k + 1) * channels, found[k], mask=inside)
        sums += strips * kept * channels


@triton.jit(do_not_specialize=_WRITE_SIZES)
def write_rows(
    x, sums, reference, gates, residual, out, norm_mean, norm_variance, norm_weight, norm_bias, epsilon,
    gated, normed, lower, upper, units, n, width, rows, strips, rows_written, segments,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, UNIT: tl.constexpr, LAST: tl.constexpr,
    BANDS: tl.constexpr, EARLY: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write `rows_written` rows of a strip, from the sums of all segments."""
    wait_for_previous_kernel(EARLY)
    channels = units * UNIT
    image, part, channel = program_tile(channels, strips * tl.cdiv(rows, rows_written), MAPS)
    begin = image * channels * n
    gate, known = tl.load(gates + image * gated), load_reference(reference, channel, channels, BANDS)
    pivot, low, high, low2, high2, _, _ = _load_sums(sums, image, channel, channels, segments, MAPS, False)
    scale, shift = scale_and_shift(norm_mean, norm_variance, norm_weight, norm_bias, epsilon, channel, channels, normed)
    start, gain, gain_of_mean, moves = coefficients(known, gate, pivot, low, high, low2, high2, scale, shift, n, BANDS)
    top, bottom, column = _segment_bounds(part, rows, strips, rows_written, PAIRS, LAST)
    _write_strip(
        x + begin, residual + begin, out + begin, channel, top, bottom, column, start, gain, gain_of_mean, moves,
        lower, upper,
        channels, n, width, rows, PAIRS, LAST, BANDS, ADD,
    )  # fmt: skip


@triton.jit
def _write_strip(
    x, residual, out, channel, top, bottom, column, start, gain, gain_of_mean, moves,
    lower, upper, channels, n, width, rows,
    PAIRS: tl.constexpr, LAST: tl.constexpr,
    BANDS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    if BANDS:
        write_with_bands(
            x, residual, out, channel, top, bottom, column, start, gain, gain_of_mean, moves,
            lower, upper,
            channels, n, width, rows, PAIRS, LAST, ADD,
        )  # fmt: skip
    else:
        write_without_bands(
            x, residual, out, channel, top, bottom, column, start, gain, moves, lower, upper,
            channels, n, width, PAIRS, LAST, ADD,
        )  # fmt: skip


@triton.jit(do_not_specialize=_MAP_SIZES)
def moments_from_sums(
    sums, found, units, n, width, rows, strips, segments,  # noqa: ARG001
    MAPS: tl.constexpr, PAIRS: tl.constexpr, UNIT: tl.constexpr, LAST: tl.constexpr,  # noqa: ARG001
    BANDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    channels = units * UNIT
    image, _part, channel = program_tile(channels, 1, MAPS)
    pivot, low, high, low2, high2, square, rough = _load_sums(sums, image, channel, channels, segments, MAPS, True)
    store_moments(found, image, channel, pivot, low, high, low2, high2, square, rough, channels, n, BANDS)


@triton.jit
def _load_sums(sums, image, channel, channels, segments, MAPS: tl.constexpr, ALL: tl.constexpr):
    """Pivot, and the total over an image's segments of the sums that `sum_segments` stored."""
    kept: tl.constexpr = 7 if ALL else 5
    nothing = tl.zeros([MAPS], tl.float32)
    low, high, low2, high2, square, rough = nothing, nothing, nothing, nothing, nothing, nothing
    inside = channel < channels
    sums += image * segments * kept * channels + channel
    pivot = tl.load(sums, mask=inside, other=0.0)
    for segment in tl.range(segments, loop_unroll_factor=4):
        at = sums + segment * kept * channels
        low += tl.load(at + channels, mask=inside, other=0.0)
        high += tl.load(at + 2 * channels, mask=inside, other=0.0)
        low2 += tl.load(at + 3 * channels, mask=inside, other=0.0)
        high2 += tl.load(at + 4 * channels, mask=inside, other=0.0)
        if ALL:
            square += tl.load(at + 5 * channels, mask=inside, other=0.0)
            rough += tl.load(at + 6 * channels, mask=inside, other=0.0)
    return pivot, low, high, low2, high2, square, rough
