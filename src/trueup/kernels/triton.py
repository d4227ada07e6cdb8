"""The histogram method on a GPU, in Triton.

Two passes over the activations and no host in between: count them into bins, then map each through its bin's entry in
a table. Both can apply a batch norm, add a residual and apply the ReLU on their way. Where rows are many and not too
long, one program does all of that for a row. Else rows are cut into parts, and there are three kernels: to count the
parts, to make a table of each row's counts, to map the parts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.bins import BINS
from trueup.kernels.norm import Norm
from trueup.kernels.triton_histogram import (
    BLOCK,
    SEGMENT,
    WARPS,
    bin_of_zero,
    count,
    map_values,
    mean_of,
    memory_of,
    offset_exponent,
    remember,
    tabulate,
)
from trueup.kernels.triton_launch import Launch, aligned, has_ptx, overlap, overlaps, processors

WHOLE = 131072  # a row up to this length may be the work of one program
PARTS = 32  # at most: their counts have to be added
PROGRAMS_PER_PROCESSOR = 8
SLICES = {True: 16, False: 4}  # in which a row's table is made: where rows are few, and where not
# Of a thread, at most: fewer make room for more threads, more let a thread wait for more of its loads at once.
WHOLE_REGISTERS, COUNT_REGISTERS, MAP_REGISTERS = 96, 64, 48


def correct_rows(
    x: Tensor,
    curve: Tensor,
    step: float,
    *,
    keep: bool,
    sparse: bool,
    relu: bool,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    parts: int | None = None,
    shared: bool | None = None,
) -> Tensor:
    """As `plain.correct_rows`, but that denormal values count as zeros.

    A `norm` is applied first, and a `residual` like `x` added to that, without rounding in between. Channels then lie
    last, are as many as divide a block, and `relu` is wanted.

    `parts` cuts each row into as many; None chooses. `shared` says whether PTX can be used; None asks.
    """
    rows, n = x.shape
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if n == 1 and keep and norm is None:  # a single value is its own mean
        return x.relu() if relu else x.clone()
    x, curve, m = aligned(x), aligned(curve), curve.shape[1]
    more = x if residual is None else aligned(residual)
    before = (x, x, x, x) if norm is None else tuple(aligned(tensor.contiguous()) for tensor in norm.tensors)
    epsilon = 0.0 if norm is None else norm.epsilon
    dtypes = (x.dtype, *(tensor.dtype for tensor in before))
    first = (0 if norm is None else len(norm.mean), residual is not None)
    plan = _plan(rows, n, m, dtypes, x.device, relu, keep, sparse, first, parts, shared)
    sums = x.new_empty(rows * plan.segments, dtype=torch.float32)
    counts = table = sums  # in shared memory, if that is where one program does it all
    if plan.parts > 1 or not plan.shared:
        counts = x.new_empty(rows * plan.parts * plan.bins, dtype=torch.int32)
        table = x.new_empty(rows * plan.bins, dtype=torch.float32)
    if not plan.shared:
        counts.zero_()
    if plan.parts == 1:
        plan.correct_whole(x, more, *before, epsilon, curve, out, sums, counts, table, n, m, plan.segments, step)
    else:
        plan.count_parts(x, more, *before, epsilon, curve, sums, counts, n, m, plan.segments, plan.each)
        plan.tabulate_rows(curve, sums, counts, table, n, m, plan.segments, plan.parts, step)
        plan.map_parts(x, more, *before, epsilon, curve, out, table, n, m, plan.segments, plan.each)
    return out


class _Plan(NamedTuple):
    """How the work is shared out, each row in `parts` of `each` of its `segments`, and the kernels that do it."""

    parts: int
    each: int
    segments: int
    bins: int
    shared: bool
    correct_whole: Launch
    count_parts: Launch
    tabulate_rows: Launch
    map_parts: Launch


@functools.lru_cache(maxsize=1024)
def _plan(
    rows: int,
    n: int,
    m: int,
    _dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    relu: bool,
    keep: bool,
    sparse: bool,
    first: tuple[int, bool],
    parts: int | None,
    shared: bool | None,
) -> _Plan:
    """The plan for all that Triton may specialise a kernel on, so that what it compiles can be kept there.

    `first` says of how many channels a norm is applied first, 0 for none, and whether something is added to that.
    """
    if shared is None:
        shared = has_ptx(device)
    segments = -(-n // SEGMENT)
    if parts is None:
        programs = PROGRAMS_PER_PROCESSOR * processors(device)
        parts = 1 if rows >= processors(device) and n <= WHOLE else -(-programs // rows)
    each = -(-segments // min(parts, segments, PARTS))
    parts = -(-segments // each)
    bins = BINS if relu else 2 * BINS
    early = overlaps(device, parts * rows)
    passes = (relu, bins, BLOCK, SEGMENT, shared, *first, early)
    options = {"num_warps": WARPS, **({"launch_pdl": True} if early else {})}
    rule = (keep, sparse, 1 << (segments - 1).bit_length())
    bits = (m - 2).bit_length()
    slices = SLICES[rows * SLICES[True] <= processors(device)]
    return _Plan(
        parts,
        each,
        segments,
        bins,
        shared,
        Launch(_correct_whole, (rows, 1, 1), (*passes, *rule, 2, bits), maxnreg=WHOLE_REGISTERS, **options),
        Launch(_count_parts, (parts, rows, 1), passes, maxnreg=COUNT_REGISTERS, **options),
        Launch(
            _tabulate_rows,
            (slices, rows, 1),
            (relu, bins, bins // slices, SEGMENT, early, *rule, 4, -(-bits // 2)),
            **options,
        ),
        Launch(_map_parts, (parts, rows, 1), passes, maxnreg=MAP_REGISTERS, **options),
    )


@triton.jit
def _correct_whole(
    x, residual, norm_mean, norm_variance, norm_weight, norm_bias, epsilon,
    curve, out, sums, counts, table, n, m, segments, step,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, SEGMENTS: tl.constexpr, WAYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    residual += row * n
    sums += row * segments
    table += row * BINS
    norm = (norm_mean, norm_variance, norm_weight, norm_bias, epsilon)
    offset = offset_exponent(curve, m)
    memory = memory_of(BINS, SHARED)
    counted = count(
        x, residual, norm, sums, counts + row * BINS, memory, offset, n, 0, segments,
        RELU, BINS, BLOCK, SEGMENT, SHARED, CHANNELS, ADD,
    )  # fmt: skip
    index = tl.arange(0, BINS)
    counted += tl.where(index == bin_of_zero(RELU), n - segments * SEGMENT, 0)
    mean = mean_of(sums, segments, SEGMENTS)
    shift = tabulate(index, counted, 0, mean, curve, n, m, step, KEEP, SPARSE, RELU, BINS, WAYS, SEARCH)
    remember(shift, table, memory, BINS, SHARED)
    map_values(
        x, residual, norm, out + row * n, table, memory, offset, n, 0, segments,
        RELU, BINS, BLOCK, SEGMENT, SHARED, CHANNELS, ADD,
    )  # fmt: skip


@triton.jit
def _count_parts(
    x, residual, norm_mean, norm_variance, norm_weight, norm_bias, epsilon,
    curve, sums, counts, n, m, segments, each,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    counts += (row * tl.num_programs(0) + part) * BINS
    counted = count(
        x + row * n, residual + row * n, (norm_mean, norm_variance, norm_weight, norm_bias, epsilon),
        sums + row * segments, counts, memory_of(BINS, SHARED), offset_exponent(curve, m), n,
        part * each, tl.minimum((part + 1) * each, segments), RELU, BINS, BLOCK, SEGMENT, SHARED, CHANNELS, ADD,
    )  # fmt: skip
    if SHARED:
        tl.store(counts + tl.arange(0, BINS), counted)


@triton.jit
def _tabulate_rows(
    curve, sums, counts, table, n, m, segments, parts, step,
    RELU: tl.constexpr, BINS: tl.constexpr, SLICE: tl.constexpr, SEGMENT: tl.constexpr, EARLY: tl.constexpr,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, SEGMENTS: tl.constexpr, WAYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    begin = tl.program_id(0) * SLICE
    row = tl.program_id(1).to(tl.int64)
    counts += row * parts * BINS
    index = begin + tl.arange(0, SLICE)
    every = tl.arange(0, BINS)
    counted = tl.zeros([SLICE], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for part in tl.range(parts, loop_unroll_factor=8):  # so that loads do not wait for each other
        counted += tl.load(counts + part * BINS + index)
        before += tl.load(counts + part * BINS + every, mask=every < begin, other=0)
    padding = segments * SEGMENT - n
    counted -= tl.where(index == bin_of_zero(RELU), padding, 0)
    first = tl.sum(before) - tl.where(begin > bin_of_zero(RELU), padding, 0)
    mean = mean_of(sums + row * segments, segments, SEGMENTS)
    shift = tabulate(index, counted, first, mean, curve, n, m, step, KEEP, SPARSE, RELU, BINS, WAYS, SEARCH)
    tl.store(table + row * BINS + index, shift)


@triton.jit
def _map_parts(
    x, residual, norm_mean, norm_variance, norm_weight, norm_bias, epsilon,
    curve, out, table, n, m, segments, each,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    # Backwards: what was counted last may still be in the cache.
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    table += row * BINS
    memory = memory_of(BINS, SHARED)
    if SHARED:
        remember(tl.load(table + tl.arange(0, BINS)), table, memory, BINS, SHARED)
    map_values(
        x + row * n, residual + row * n, (norm_mean, norm_variance, norm_weight, norm_bias, epsilon),
        out + row * n, table, memory, offset_exponent(curve, m), n,
        part * each, tl.minimum((part + 1) * each, segments), RELU, BINS, BLOCK, SEGMENT, SHARED, CHANNELS, ADD,
    )  # fmt: skip
