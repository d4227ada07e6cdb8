"""Quantile functions from histograms in Triton, for calibration.

A row's bins depend on its largest value, so there are two passes: find the range, then count. A short row takes one
program. Longer rows are divided into parts and take three kernels: the range of each part, the counts of each part, the
quantiles of each row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.bins import BINS
from trueup.kernels.cuda.bins import bin_of_zero, lower_edge, offset_exponent_of_row
from trueup.kernels.cuda.histogram import (
    BLOCK,
    SEGMENT,
    WARPS,
    count_values,
    load_block,
    look_up,
    mean_of_row,
    shared_bins,
    store_table,
)
from trueup.kernels.cuda.launch import Launch, aligned, has_ptx, processors

WHOLE = 32768  # values, at most, of a row that one program handles
PARTS = 32  # parts per row, at most: their counts have to be added
PROGRAMS_PER_PROCESSOR = 4
LEVELS = 1024  # levels that a program handles at a time

_HALF = tl.constexpr(BINS)


def quantile_rows(rows: Tensor, levels: Tensor, *, parts: int | None = None) -> Tensor:
    """As `plain.quantile_rows`, except that denormals count as zeros; `levels` may be in any order.

    `parts` is the number of parts per row; None chooses.
    """
    batch, n = rows.shape
    out = rows.new_empty(batch, len(levels), dtype=torch.float32)
    if out.numel() == 0:
        return out
    rows, levels = aligned(rows), aligned(levels)
    plan = _plan(batch, n, len(levels), rows.dtype, rows.device, parts)
    # The sums of segments, followed by the ranges of parts.
    sums = rows.new_empty(batch * (plan.segments + 2 * plan.parts), dtype=torch.float32)
    counts = sums
    if plan.parts > 1 or not plan.shared:
        counts = rows.new_empty(batch * plan.parts * 2 * BINS, dtype=torch.int32)
    if not plan.shared:
        counts.zero_()
    if plan.parts == 1:
        plan.whole((rows, levels, out, sums, counts), n, len(levels), plan.segments)
    else:
        plan.find_ranges((rows, sums), n, plan.segments, plan.segments_per_part)
        plan.count_parts((rows, sums, counts), n, plan.segments, plan.segments_per_part)
        plan.quantiles_of_rows((levels, out, sums, counts), n, len(levels), plan.segments, plan.parts)
    return out


class _Plan(NamedTuple):
    """Division of the work among programs, and the kernels that do it."""

    parts: int  # of a row
    segments_per_part: int
    segments: int  # of a row
    shared: bool
    whole: Launch
    find_ranges: Launch
    count_parts: Launch
    quantiles_of_rows: Launch


@functools.lru_cache(maxsize=1024)
def _plan(
    rows: int,
    n: int,
    _m: int,
    _dtype: torch.dtype,
    device: torch.device,
    parts: int | None,
) -> _Plan:
    """Return the plan for everything that Triton may specialise a kernel on; it keeps the compiled kernels."""
    shared = has_ptx(device)
    segments = -(-n // SEGMENT)
    if parts is None:
        parts = 1 if n <= WHOLE else -(-PROGRAMS_PER_PROCESSOR * processors(device) // rows)
    segments_per_part = -(-segments // min(parts, segments, PARTS))
    parts = -(-segments // segments_per_part)
    segment_lanes = max(128, 1 << (segments - 1).bit_length())  # at least 128, so that fewer kernels are compiled
    passes = (2 * BINS, BLOCK, SEGMENT, shared)
    return _Plan(
        parts,
        segments_per_part,
        segments,
        shared,
        Launch(_quantiles_of_short_rows, (rows, 1, 1), (*passes, segment_lanes, LEVELS), num_warps=WARPS),
        Launch(_find_ranges, (parts, rows, 1), (BLOCK, SEGMENT), num_warps=WARPS),
        Launch(_count_parts, (parts, rows, 1), (*passes, PARTS), num_warps=WARPS),
        Launch(
            _quantiles_of_rows,
            (rows, 1, 1),
            (2 * BINS, SEGMENT, shared, segment_lanes, PARTS, LEVELS),
            num_warps=WARPS,
        ),
    )


@triton.jit
def _quantiles_of_short_rows(
    x, levels, out, sums, counts, n, m, segments,
    BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr, SEGMENTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    sums += row * segments
    counts += row * BINS
    smallest, largest = _range(x, n, 0, n, BLOCK)
    offset = offset_exponent_of_row(smallest, largest)
    memory = shared_bins(BINS, SHARED)
    counted = count_values(
        x, None, None, sums, counts, memory, offset, n, 0, segments, False, BINS, BLOCK, SEGMENT, SHARED, 0, False
    )
    finite = tl.abs(mean_of_row(sums, segments, SEGMENTS)) < float("inf")
    _write_quantiles(
        levels, out + row * m, counted, counts, memory, smallest, largest, finite, offset, n, m, segments,
        BINS, SEGMENT, SHARED, LEVELS,
    )  # fmt: skip


@triton.jit
def _find_ranges(x, sums, n, segments, segments_per_part, BLOCK: tl.constexpr, SEGMENT: tl.constexpr):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(0)
    first = part * segments_per_part * SEGMENT
    last = tl.minimum(first + segments_per_part * SEGMENT, n)
    smallest, largest = _range(x + row * n, n, first, last, BLOCK)
    ranges = sums + tl.num_programs(1) * segments + row * 2 * parts
    tl.store(ranges + part, smallest)
    tl.store(ranges + parts + part, largest)


@triton.jit
def _count_parts(
    x, sums, counts, n, segments, segments_per_part,
    BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(0)
    counts += (row * parts + part) * BINS
    smallest, largest = _range_of_parts(sums + tl.num_programs(1) * segments + row * 2 * parts, parts, PARTS)
    counted = count_values(
        x + row * n, None, None, sums + row * segments, counts, shared_bins(BINS, SHARED),
        offset_exponent_of_row(smallest, largest), n,
        part * segments_per_part, tl.minimum((part + 1) * segments_per_part, segments),
        False, BINS, BLOCK, SEGMENT, SHARED, 0, False,
    )  # fmt: skip
    if SHARED:
        tl.store(counts + tl.arange(0, BINS), counted)


@triton.jit
def _quantiles_of_rows(
    levels, out, sums, counts, n, m, segments, parts,
    BINS: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr, SEGMENTS: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    counts += row * parts * BINS
    smallest, largest = _range_of_parts(sums + tl.num_programs(0) * segments + row * 2 * parts, parts, PARTS)
    finite = tl.abs(mean_of_row(sums + row * segments, segments, SEGMENTS)) < float("inf")
    counted = tl.zeros([BINS], tl.int32)
    for part in tl.range(parts, loop_unroll_factor=4):  # unrolled, so that loads do not wait for each other
        counted += tl.load(counts + part * BINS + tl.arange(0, BINS))
    tl.debug_barrier()  # without shared memory, the first part's counts are overwritten
    _write_quantiles(
        levels, out + row * m, counted, counts, shared_bins(BINS, SHARED), smallest, largest, finite,
        offset_exponent_of_row(smallest, largest),
        n, m, segments, BINS, SEGMENT, SHARED, LEVELS,
    )  # fmt: skip


@triton.jit
def _range(x, n, first, last, BLOCK: tl.constexpr):
    """Smallest and largest of the values `first` to `last - 1`, ignoring NaN."""
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = load_block(x, None, at, 1.0, 0.0, n, False, 0, False)
        low = tl.minimum(low, tl.where(at < n, a, float("inf")))
        high = tl.maximum(high, tl.where(at < n, a, float("-inf")))
    return tl.min(low), tl.max(high)


@triton.jit
def _range_of_parts(ranges, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    low = tl.load(ranges + part, mask=part < parts, other=float("inf"))
    high = tl.load(ranges + parts + part, mask=part < parts, other=float("-inf"))
    return tl.min(low), tl.max(high)


@triton.jit
def _write_quantiles(
    levels, out, counted, counts, memory, smallest, largest, finite, offset, n, m, segments,
    BINS: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Write a row's quantiles from its counts, less those of the padding zeros."""
    counted += tl.where(tl.arange(0, BINS) == bin_of_zero(True), n - segments * SEGMENT, 0)
    ends = counts.to(tl.pointer_type(tl.float32))
    store_table(tl.cumsum(counted).to(tl.float32, bitcast=True), ends, memory, BINS, SHARED)
    for begin in range(0, m, LEVELS):
        at = begin + tl.arange(0, LEVELS)
        position = tl.load(levels + at, mask=at < m, other=0.0) * (n - 1)
        rank = position.to(tl.int32)
        lower = _order_statistic(rank, smallest, largest, ends, memory, offset, n, SHARED)
        upper = _order_statistic(tl.minimum(rank + 1, n - 1), smallest, largest, ends, memory, offset, n, SHARED)
        value = lower + (position - rank) * (upper - lower)
        tl.store(out + at, tl.where(finite, value, float("nan")).to(tl.float32), mask=at < m)


@triton.jit
def _order_statistic(rank, smallest, largest, ends, memory, offset, n, SHARED: tl.constexpr):
    """Value of each rank, as if the values of its bin were evenly spaced between the bin's edges: float64."""
    index = tl.zeros_like(rank)  # bin of the rank: the number of bins that end at or before it
    for bit in tl.static_range(12):
        ahead = index + (1 << (11 - bit))
        index = tl.where(_end_of_bin(ends, memory, ahead - 1, SHARED) <= rank, ahead, index)
    first = tl.where(index > 0, _end_of_bin(ends, memory, tl.maximum(index - 1, 0), SHARED), 0)
    share = (rank - first + 0.5) / (_end_of_bin(ends, memory, index, SHARED) - first).to(tl.float64)
    side = index - _HALF
    near = lower_edge(tl.abs(side), offset)
    far = tl.where(side == 0, 0.0, lower_edge(tl.abs(side) + 1, offset))  # zeros are exact
    left = tl.where(side < 0, -far, near).to(tl.float64)
    right = tl.where(side < 0, -near, far).to(tl.float64)
    value = tl.minimum(tl.maximum(left + share * (right - left), smallest), largest)
    return tl.where(rank == 0, smallest, tl.where(rank == n - 1, largest, value))


@triton.jit
def _end_of_bin(ends, memory, index, SHARED: tl.constexpr):
    """Number of values in this bin and all bins below it."""
    return look_up(ends, memory, index, SHARED).to(tl.int32, bitcast=True)
