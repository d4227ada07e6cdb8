"""The histogram method in Triton.

Two passes over the activations, without the host in between: count them into bins, then map each through its bin's
entry in a table. Both passes can apply a batch norm, add a residual and apply the ReLU. If there are many rows that are
not too long, one program does all of that for a row. Otherwise rows are divided into parts, and there are three
kernels: count each part, make a table per row, map each part.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.bins import BINS
from trueup.kernels.cuda.bins import bin_of_zero, offset_exponent
from trueup.kernels.cuda.histogram import (
    BLOCK,
    SEGMENT,
    WARPS,
    count_values,
    map_values,
    mean_of_row,
    shared_bins,
    shifts_of_bins,
    store_table,
)
from trueup.kernels.cuda.launch import (
    Launch,
    aligned,
    has_ptx,
    processors,
    ready,
    starts_early,
    wait_for_previous_kernel,
)
from trueup.kernels.fused_norms import BatchNorm

WHOLE = 131072  # values, at most, of a row that one program corrects
PARTS = 32  # parts per row, at most: their counts have to be added
PROGRAMS_PER_PROCESSOR = 8
SLICES = {True: 16, False: 4}  # programs that make a row's table: if there are few rows, and otherwise
WAYS = 4  # per step of the search in a target's levels (`read_curve`), if several programs make a row's table
# Registers per thread, at most: fewer allow more threads, more allow each thread more loads in flight.
WHOLE_REGISTERS, MAP_REGISTERS = 96, 48


def transport_rows(
    x: Tensor,
    curve: Tensor,
    step: float,
    *,
    keep: bool,
    sparse: bool,
    relu: bool,
    norm: BatchNorm | None = None,
    residual: Tensor | None = None,
    parts: int | None = None,
    shared: bool | None = None,
) -> Tensor:
    """As `plain.transport_rows`, except that denormals count as zeros.

    A `norm` is applied first, and a `residual` with the layout of `x` added to that, without rounding in between. This
    needs channels that lie last and whose number divides `BLOCK`, and `relu`.

    `parts` is the number of parts per row, and `shared` says whether PTX can be used; None chooses.
    """
    rows, n = x.shape
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if n == 1 and keep and norm is None:  # a single value is its own mean
        return x.relu() if relu else x.clone()
    x, curve, m = aligned(x), aligned(curve), curve.shape[1]
    added = x if residual is None else aligned(residual)
    norm_tensors = (x, x, x, x) if norm is None else tuple(ready(tensor) for tensor in norm.tensors)
    epsilon = 0.0 if norm is None else norm.epsilon
    dtypes = (x.dtype, *(tensor.dtype for tensor in norm_tensors))
    fused = (0 if norm is None else len(norm.mean), residual is not None)
    plan = _plan(rows, n, m, dtypes, x.device, relu, keep, sparse, fused, parts, shared)
    sums = x.new_empty(rows * plan.segments, dtype=torch.float32)
    counts = table = sums  # unused if one program keeps them in shared memory
    if plan.parts > 1 or not plan.shared:
        counts = x.new_empty(rows * plan.parts * plan.bins, dtype=torch.int32)
        table = x.new_empty(rows * plan.bins, dtype=torch.float32)
    if not plan.shared:
        counts.zero_()
    inputs = (x, added, *norm_tensors, curve)
    if plan.parts == 1:
        plan.transport_whole((*inputs, out, sums, counts, table), epsilon, n, m, plan.segments, step)
    else:
        plan.count_parts((*inputs, sums, counts), epsilon, n, m, plan.segments, plan.segments_per_part)
        plan.make_tables((curve, sums, counts, table), n, m, plan.segments, plan.parts, step)
        plan.map_parts((*inputs, out, table), epsilon, n, m, plan.segments, plan.segments_per_part)
    return out


class _Plan(NamedTuple):
    """Division of the work among programs, and the kernels that do it."""

    parts: int  # of a row
    segments_per_part: int
    segments: int  # of a row
    bins: int
    shared: bool
    transport_whole: Launch
    count_parts: Launch
    make_tables: Launch
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
    fused: tuple[int, bool],
    parts: int | None,
    shared: bool | None,
) -> _Plan:
    """Return the plan for everything that Triton may specialise a kernel on; it keeps the compiled kernels.

    `fused` is the number of channels of the norm, 0 without one, and whether there is a residual.
    """
    if shared is None:
        shared = has_ptx(device)
    segments = -(-n // SEGMENT)
    if parts is None:
        programs = PROGRAMS_PER_PROCESSOR * processors(device)
        parts = 1 if rows >= processors(device) and n <= WHOLE else -(-programs // rows)
    segments_per_part = -(-segments // min(parts, segments, PARTS))
    parts = -(-segments // segments_per_part)
    bins = BINS if relu else 2 * BINS
    early = starts_early(device, parts * rows)
    passes = (relu, bins, BLOCK, SEGMENT, shared, *fused, early)
    options = {"num_warps": WARPS, **({"launch_pdl": True} if early else {})}
    rule = (keep, sparse, 1 << (segments - 1).bit_length())
    bits = (m - 2).bit_length()
    slices = SLICES[rows * SLICES[True] <= processors(device)]
    return _Plan(
        parts,
        segments_per_part,
        segments,
        bins,
        shared,
        Launch(_transport_whole, (rows, 1, 1), (*passes, *rule, 2, bits), maxnreg=WHOLE_REGISTERS, **options),
        Launch(_count_parts, (parts, rows, 1), passes, **options),
        Launch(
            _make_tables,
            (slices, rows, 1),
            (relu, bins, bins // slices, SEGMENT, early, *rule, WAYS, -(-bits // (WAYS.bit_length() - 1))),
            **options,
        ),
        Launch(_map_parts, (parts, rows, 1), passes, maxnreg=MAP_REGISTERS, **options),
    )


@triton.jit
def _transport_whole(
    x, residual, norm_mean, norm_variance, norm_weight, norm_bias,
    curve, out, sums, counts, table, epsilon, n, m, segments, step,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, SEGMENTS: tl.constexpr, WAYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    residual += row * n
    sums += row * segments
    table += row * BINS
    norm = (norm_mean, norm_variance, norm_weight, norm_bias, epsilon)
    offset = offset_exponent(curve, m)
    memory = shared_bins(BINS, SHARED)
    counted = count_values(
        x, residual, norm, sums, counts + row * BINS, memory, offset, n, 0, segments,
        RELU, BINS, BLOCK, SEGMENT, SHARED, CHANNELS, ADD,
    )  # fmt: skip
    index = tl.arange(0, BINS)
    counted += tl.where(index == bin_of_zero(not RELU), n - segments * SEGMENT, 0)
    mean = mean_of_row(sums, segments, SEGMENTS)
    shift = shifts_of_bins(index, counted, 0, mean, curve, n, m, step, KEEP, SPARSE, RELU, BINS, WAYS, SEARCH)
    store_table(shift, table, memory, BINS, SHARED)
    map_values(
        x, residual, norm, out + row * n, table, memory, offset, n, 0, segments,
        RELU, BINS, BLOCK, SEGMENT, SHARED, CHANNELS, ADD,
    )  # fmt: skip


@triton.jit
def _count_parts(
    x, residual, norm_mean, norm_variance, norm_weight, norm_bias,
    curve, sums, counts, epsilon, n, m, segments, segments_per_part,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    counts += (row * tl.num_programs(0) + part) * BINS
    counted = count_values(
        x + row * n, residual + row * n, (norm_mean, norm_variance, norm_weight, norm_bias, epsilon),
        sums + row * segments, counts, shared_bins(BINS, SHARED), offset_exponent(curve, m), n,
        part * segments_per_part, tl.minimum((part + 1) * segments_per_part, segments),
        RELU, BINS, BLOCK, SEGMENT, SHARED, CHANNELS, ADD,
    )  # fmt: skip
    if SHARED:
        tl.store(counts + tl.arange(0, BINS), counted)


@triton.jit
def _make_tables(
    curve, sums, counts, table, n, m, segments, parts, step,
    RELU: tl.constexpr, BINS: tl.constexpr, SLICE: tl.constexpr, SEGMENT: tl.constexpr, EARLY: tl.constexpr,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, SEGMENTS: tl.constexpr, WAYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    begin = tl.program_id(0) * SLICE
    row = tl.program_id(1).to(tl.int64)
    counts += row * parts * BINS
    index = begin + tl.arange(0, SLICE)
    all_bins = tl.arange(0, BINS)
    counted = tl.zeros([SLICE], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for part in tl.range(parts, loop_unroll_factor=8):  # unrolled, so that loads do not wait for each other
        counted += tl.load(counts + part * BINS + index)
        before += tl.load(counts + part * BINS + all_bins, mask=all_bins < begin, other=0)
    padding = segments * SEGMENT - n
    counted -= tl.where(index == bin_of_zero(not RELU), padding, 0)
    first = tl.sum(before) - tl.where(begin > bin_of_zero(not RELU), padding, 0)
    mean = mean_of_row(sums + row * segments, segments, SEGMENTS)
    shift = shifts_of_bins(index, counted, first, mean, curve, n, m, step, KEEP, SPARSE, RELU, BINS, WAYS, SEARCH)
    tl.store(table + row * BINS + index, shift)


@triton.jit
def _map_parts(
    x, residual, norm_mean, norm_variance, norm_weight, norm_bias,
    curve, out, table, epsilon, n, m, segments, segments_per_part,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous_kernel(EARLY)
    # Backwards: the values counted last may still be in the cache.
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    table += row * BINS
    memory = shared_bins(BINS, SHARED)
    if SHARED:
        store_table(tl.load(table + tl.arange(0, BINS)), table, memory, BINS, SHARED)
    map_values(
        x + row * n, residual + row * n, (norm_mean, norm_variance, norm_weight, norm_bias, epsilon),
        out + row * n, table, memory, offset_exponent(curve, m), n,
        part * segments_per_part, tl.minimum((part + 1) * segments_per_part, segments),
        RELU, BINS, BLOCK, SEGMENT, SHARED, CHANNELS, ADD,
    )  # fmt: skip
