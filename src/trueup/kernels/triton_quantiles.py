"""Quantile functions from histograms on a GPU, in Triton: what calibration reads of every row.

A row's bins depend on its largest value, so that there are two passes: to find that, and to count. Short rows are the
work of one program. Else rows are cut into parts, and there are three kernels: the range of each part, its counts, and
each row's quantiles.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.bins import BINS, FINE, OCTAVES, OUTSIDE, SHIFT, SPAN
from trueup.kernels.triton_histogram import BLOCK, SEGMENT, WARPS, count, load, look_up, mean_of, memory_of, remember
from trueup.kernels.triton_launch import Launch, aligned, has_ptx, processors

WHOLE = 32768  # a row up to this length is the work of one program
PARTS = 32  # at most: their counts have to be added
PROGRAMS_PER_PROCESSOR = 4
LEVELS = 1024  # read at a time

_HALF = tl.constexpr(BINS)
_SHIFT = tl.constexpr(SHIFT)
_FINE = tl.constexpr(FINE)
_OCTAVES = tl.constexpr(OCTAVES)
_OUTSIDE = tl.constexpr(OUTSIDE)
_SPAN = tl.constexpr(SPAN)


def quantile_rows(rows: Tensor, levels: Tensor, *, parts: int | None = None, shared: bool | None = None) -> Tensor:
    """As `plain.quantile_rows`, of rows of any width, but that denormal values count as zeros; levels in any order.

    `parts` cuts each row into as many; None chooses. `shared` says whether PTX can be used; None asks.
    """
    batch, n = rows.shape
    out = rows.new_empty(batch, len(levels), dtype=torch.float32)
    if out.numel() == 0:
        return out
    rows, levels = aligned(rows), aligned(levels)
    plan = _plan(batch, n, len(levels), rows.dtype, rows.device, parts, shared)
    sums = rows.new_empty(batch * (plan.segments + 2 * plan.parts), dtype=torch.float32)  # and the ranges after them
    counts = sums
    if plan.parts > 1 or not plan.shared:
        counts = rows.new_empty(batch * plan.parts * 2 * BINS, dtype=torch.int32)
    if not plan.shared:
        counts.zero_()
    if plan.parts == 1:
        plan.whole(rows, levels, out, sums, counts, n, len(levels), plan.segments)
    else:
        plan.find_ranges(rows, sums, n, plan.segments, plan.each)
        plan.count_parts(rows, sums, counts, n, plan.segments, plan.each)
        plan.read_rows(levels, out, sums, counts, n, len(levels), plan.segments, plan.parts)
    return out


class _Plan(NamedTuple):
    """How the work is shared out, each row in `parts` of `each` of its `segments`, and the kernels that do it."""

    parts: int
    each: int
    segments: int
    shared: bool
    whole: Launch
    find_ranges: Launch
    count_parts: Launch
    read_rows: Launch


@functools.lru_cache(maxsize=1024)
def _plan(
    rows: int,
    n: int,
    _m: int,
    _dtype: torch.dtype,
    device: torch.device,
    parts: int | None,
    shared: bool | None,
) -> _Plan:
    """The plan for all that Triton may specialise a kernel on, so that what it compiles can be kept there."""
    if shared is None:
        shared = has_ptx(device)
    segments = -(-n // SEGMENT)
    if parts is None:
        parts = 1 if n <= WHOLE else -(-PROGRAMS_PER_PROCESSOR * processors(device) // rows)
    each = -(-segments // min(parts, segments, PARTS))
    parts = -(-segments // each)
    most = max(128, 1 << (segments - 1).bit_length())  # more than most rows have: fewer kernels to compile
    passes = (2 * BINS, BLOCK, SEGMENT, shared)
    return _Plan(
        parts,
        each,
        segments,
        shared,
        Launch(_whole, (rows, 1, 1), (*passes, most, LEVELS), num_warps=WARPS),
        Launch(_find_ranges, (parts, rows, 1), (BLOCK, SEGMENT), num_warps=WARPS),
        Launch(_count_parts, (parts, rows, 1), (*passes, PARTS), num_warps=WARPS),
        Launch(_read_rows, (rows, 1, 1), (2 * BINS, SEGMENT, shared, most, PARTS, LEVELS), num_warps=WARPS),
    )


@triton.jit
def _whole(
    x, levels, out, sums, counts, n, m, segments,
    BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr, SEGMENTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    sums += row * segments
    counts += row * BINS
    least, most = _range(x, n, 0, n, BLOCK)
    offset = _offset(least, most)
    memory = memory_of(BINS, SHARED)
    counted = count(
        x, None, None, sums, counts, memory, offset, n, 0, segments, False, BINS, BLOCK, SEGMENT, SHARED, 0, False
    )
    finite = tl.abs(mean_of(sums, segments, SEGMENTS)) < float("inf")
    _read(
        levels, out + row * m, counted, counts, memory, least, most, finite, offset, n, m, segments,
        BINS, SEGMENT, SHARED, LEVELS,
    )  # fmt: skip


@triton.jit
def _find_ranges(x, sums, n, segments, each, BLOCK: tl.constexpr, SEGMENT: tl.constexpr):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(0)
    first = part * each * SEGMENT
    least, most = _range(x + row * n, n, first, tl.minimum(first + each * SEGMENT, n), BLOCK)
    ranges = sums + tl.num_programs(1) * segments + row * 2 * parts
    tl.store(ranges + part, least)
    tl.store(ranges + parts + part, most)


@triton.jit
def _count_parts(
    x, sums, counts, n, segments, each,
    BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(0)
    counts += (row * parts + part) * BINS
    least, most = _range_of_parts(sums + tl.num_programs(1) * segments + row * 2 * parts, parts, PARTS)
    counted = count(
        x + row * n, None, None, sums + row * segments, counts, memory_of(BINS, SHARED), _offset(least, most), n,
        part * each, tl.minimum((part + 1) * each, segments), False, BINS, BLOCK, SEGMENT, SHARED, 0, False,
    )  # fmt: skip
    if SHARED:
        tl.store(counts + tl.arange(0, BINS), counted)


@triton.jit
def _read_rows(
    levels, out, sums, counts, n, m, segments, parts,
    BINS: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr, SEGMENTS: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    counts += row * parts * BINS
    least, most = _range_of_parts(sums + tl.num_programs(0) * segments + row * 2 * parts, parts, PARTS)
    finite = tl.abs(mean_of(sums + row * segments, segments, SEGMENTS)) < float("inf")
    counted = tl.zeros([BINS], tl.int32)
    for part in tl.range(parts, loop_unroll_factor=4):  # so that loads do not wait for each other
        counted += tl.load(counts + part * BINS + tl.arange(0, BINS))
    tl.debug_barrier()  # without shared memory, the first part's counts are written over
    _read(
        levels, out + row * m, counted, counts, memory_of(BINS, SHARED), least, most, finite, _offset(least, most),
        n, m, segments, BINS, SEGMENT, SHARED, LEVELS,
    )  # fmt: skip


@triton.jit
def _range(x, n, first, last, BLOCK: tl.constexpr):
    """The smallest and the largest of some values; NaN does not count."""
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = load(x, None, at, 1.0, 0.0, n, False, 0, False)
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
def _offset(least, most):
    """As `bins.offset_exponent_of_row`."""
    exponent = tl.maximum(tl.abs(least), tl.abs(most)).to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(exponent - (_OCTAVES - 2), _OUTSIDE), 255 - _OCTAVES)


@triton.jit
def _read(
    levels, out, counted, counts, memory, least, most, finite, offset, n, m, segments,
    BINS: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """A row's quantiles from its counts, of which the padding's zeros are taken off."""
    counted += tl.where(tl.arange(0, BINS) == _HALF, n - segments * SEGMENT, 0)
    ends = counts.to(tl.pointer_type(tl.float32))
    remember(tl.cumsum(counted).to(tl.float32, bitcast=True), ends, memory, BINS, SHARED)
    for begin in range(0, m, LEVELS):
        at = begin + tl.arange(0, LEVELS)
        position = tl.load(levels + at, mask=at < m, other=0.0) * (n - 1)
        rank = position.to(tl.int32)
        lower = _order_statistic(rank, least, most, ends, memory, offset, n, SHARED)
        upper = _order_statistic(tl.minimum(rank + 1, n - 1), least, most, ends, memory, offset, n, SHARED)
        value = lower + (position - rank) * (upper - lower)
        tl.store(out + at, tl.where(finite, value, float("nan")).to(tl.float32), mask=at < m)


@triton.jit
def _order_statistic(rank, least, most, ends, memory, offset, n, SHARED: tl.constexpr):
    """Where the value of a rank is, if those of its bin lie evenly between the bin's edges: float64."""
    which = tl.zeros_like(rank)  # how many bins end at or before the rank
    for bit in tl.static_range(12):
        ahead = which + (1 << (11 - bit))
        which = tl.where(_end(ends, memory, ahead - 1, SHARED) <= rank, ahead, which)
    first = tl.where(which > 0, _end(ends, memory, tl.maximum(which - 1, 0), SHARED), 0)
    share = (rank - first + 0.5) / (_end(ends, memory, which, SHARED) - first).to(tl.float64)
    side = which - _HALF
    near = _edge(tl.abs(side), offset)
    far = tl.where(side == 0, 0.0, _edge(tl.abs(side) + 1, offset))  # zeros are exact
    left = tl.where(side < 0, -far, near).to(tl.float64)
    right = tl.where(side < 0, -near, far).to(tl.float64)
    value = tl.minimum(tl.maximum(left + share * (right - left), least), most)
    return tl.where(rank == 0, least, tl.where(rank == n - 1, most, value))


@triton.jit
def _end(ends, memory, index, SHARED: tl.constexpr):
    """How many values are in the bins up to one, and in that."""
    return look_up(ends, memory, index, SHARED).to(tl.int32, bitcast=True)


@triton.jit
def _edge(index, offset):
    """Where a bin of values that are not negative begins: as `bins.lower_edges`."""
    fine = index - (offset - _OUTSIDE)
    within = ((offset * _FINE + tl.minimum(tl.maximum(fine, 0), _FINE * _OCTAVES)) << _SHIFT).to(
        tl.float32, bitcast=True
    )
    outside = tl.where(fine <= 0, index, index - _FINE * _OCTAVES + _SPAN)
    outside = (tl.minimum(tl.maximum(outside, 0), 255) << 23).to(tl.float32, bitcast=True)
    inside = (fine > 0) & (fine <= _FINE * _OCTAVES)
    return tl.where(inside, within - (offset << 23).to(tl.float32, bitcast=True), outside)
