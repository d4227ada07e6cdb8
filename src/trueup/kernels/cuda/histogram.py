"""Device functions of the histogram method: load and count values, make a table of shifts, map values through it.

Triton's own histogram, and atomics in global memory, take many times as long as reading the values. Atomics in shared
memory are fast enough and need a line of inline PTX each: `_MEMORY_2048` and `_MEMORY_4096` declare the memory, `_ADD`,
`_PUT` and `_GET` access it. Without PTX (`SHARED` is false: other vendors, Triton's interpreter), the same functions
use global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.kernels.cuda.bins import bin_of, bin_of_zero
from trueup.kernels.cuda.elementwise import clamp_to_float16, relu, scale_and_shift

BLOCK = 4096  # activations that a program loads at a time: four 16-byte loads per thread in float32
SEGMENT = 8192  # activations per partial sum: the order of summation must not depend on how rows are divided
WARPS = 8  # the same in all kernels, because the order of summation depends on it

# Declared in a scope, so that the name can be used again; in PTX the memory outlives the scope.
_MEMORY_2048 = tl.constexpr("{ .shared .align 16 .b8 bins[8192]; mov.u32 $0, bins; }")
_MEMORY_4096 = tl.constexpr("{ .shared .align 16 .b8 bins[16384]; mov.u32 $0, bins; }")
_ADD = tl.constexpr("red.shared.add.u32 [$1], 1; mov.u32 $0, 0;")
_PUT = tl.constexpr("st.shared.b32 [$1], $2; mov.u32 $0, 0;")
_GET = tl.constexpr("ld.shared.b32 $0, [$1];")


@triton.jit
def shared_bins(BINS: tl.constexpr, SHARED: tl.constexpr):
    """Address of the program's bins in shared memory."""
    if not SHARED:
        return 0
    if BINS == 2048:
        return tl.inline_asm_elementwise(_MEMORY_2048, "=r,r", [0], tl.int32, is_pure=False, pack=1)
    return tl.inline_asm_elementwise(_MEMORY_4096, "=r,r", [0], tl.int32, is_pure=False, pack=1)


@triton.jit
def block_offsets(CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of the values of a block. With a norm, whose channels lie last, they have a column per channel."""
    if CHANNELS > 0:
        return (tl.arange(0, BLOCK // CHANNELS) * CHANNELS)[:, None] + tl.arange(0, CHANNELS)[None, :]
    else:  # noqa: RET505  # without the else, Triton would compile both
        return tl.arange(0, BLOCK)


@triton.jit
def norm_of_columns(norm, CHANNELS: tl.constexpr):
    """Scale and shift of each column of a block; unused without a norm, when `CHANNELS` is 0."""
    if CHANNELS > 0:
        mean, variance, weight, bias, epsilon = norm
        scale, shift = scale_and_shift(mean, variance, weight, bias, epsilon, tl.arange(0, CHANNELS), CHANNELS, 1)
        return scale[None, :], shift[None, :]
    else:  # noqa: RET505  # without the else, Triton would compile both
        return 1.0, 0.0


@triton.jit
def load_block(x, residual, at, scale, shift, n, RELU: tl.constexpr, CHANNELS: tl.constexpr, ADD: tl.constexpr):
    """Load a block of values and apply the fused norm, residual and ReLU. Out-of-range lanes are 0."""
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if CHANNELS > 0:
        a = tl.fma(a, scale, shift)
        if ADD:
            a += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        a = tl.where(inside, a, 0.0)
    if RELU:
        a = relu(a)
    return a


@triton.jit
def count_values(
    x, residual, norm, sums, counts, memory, offset, n, first, last,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Count the values of segments `first` to `last - 1`, and store each segment's share of the mean.

    Padding counts as zeros.
    """
    bins = tl.arange(0, BINS)
    if SHARED:
        nothing = tl.zeros([BINS], tl.int32)
        tl.inline_asm_elementwise(_PUT, "=r,r,r", [memory + 4 * bins, nothing], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    share = 1.0 / n
    offsets = block_offsets(CHANNELS, BLOCK)
    scale, shift = norm_of_columns(norm, CHANNELS)
    for segment in range(first, last):
        total = tl.zeros(offsets.shape, tl.float32)
        for begin in tl.static_range(0, SEGMENT, BLOCK):
            a = load_block(x, residual, segment * SEGMENT + begin + offsets, scale, shift, n, RELU, CHANNELS, ADD)
            total += a * share  # a sum of huge values would overflow
            index = bin_of(a, offset, not RELU)
            if SHARED:
                tl.inline_asm_elementwise(_ADD, "=r,r", [memory + 4 * index], tl.int32, is_pure=False, pack=1)
            else:
                tl.atomic_add(counts + index, 1)
        tl.store(sums + segment, tl.sum(total))
    tl.debug_barrier()
    if SHARED:
        counted = tl.inline_asm_elementwise(_GET, "=r,r", [memory + 4 * bins], tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()  # before the memory is used again
    else:
        counted = tl.load(counts + bins, volatile=True)
    return counted


@triton.jit
def mean_of_row(sums, segments, SEGMENTS: tl.constexpr):
    """Mean of a row from the shares that `count_values` stored."""
    at = tl.arange(0, SEGMENTS)
    return tl.sum(tl.load(sums + at, mask=at < segments, other=0.0, volatile=True))


@triton.jit
def shifts_of_bins(
    index, counted, first, mean, curve, n, m, step,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, RELU: tl.constexpr, BINS: tl.constexpr, WAYS: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    """Shift of each bin, added to its values; `first` is the rank of the first value in the first of these bins.

    The very last bin, into which no value falls, holds the factor that multiplies all values.
    """
    after = first + tl.cumsum(counted)
    ranks = tl.full([], n - 1, tl.float64)
    only = tl.where(ranks > 0, 0.0, 0.5)  # a single value is compared with the median
    ranks = tl.maximum(ranks, 1.0)
    level = 1.0 / ranks
    # Sum of the target over the ranks of a bin: its integral from the first to the last rank, plus half of each end.
    low, below_low = read_curve(curve, (after - counted) * level + only, m, WAYS, SEARCH)
    total = 0.5 * low - below_low * ranks
    high, below_high = read_curve(curve, (after - 1) * level + only, m, WAYS, SEARCH)
    total += 0.5 * high + below_high * ranks
    goal = total.to(tl.float32) / tl.maximum(counted, 1).to(tl.float32)
    if KEEP:
        ends = tl.load(curve + m) + tl.load(curve + 2 * m - 1)
        goal += (mean - (tl.load(curve + 3 * m - 1) * ranks + 0.5 * ends) / n).to(tl.float32)
    moves = tl.abs(mean) < float("inf")  # a row with NaN or infinity stays unchanged
    shift = tl.where(moves, step * goal, 0.0)
    if SPARSE:
        shift = tl.where(index == bin_of_zero(not RELU), 0.0, shift)
    return tl.where(index == BINS - 1, tl.where(moves, 1.0 - step, 1.0), shift)


@triton.jit
def read_curve(curve, at, m, WAYS: tl.constexpr, SEARCH: tl.constexpr):
    """Quantile function and its integral at the levels `at`.

    The knot on the left is found in `SEARCH` steps, each of which compares with `WAYS` - 1 knots: 2 is bisection, and
    more ways load more knots in parallel.
    """
    left = tl.zeros_like(at).to(tl.int32)
    for digit in tl.static_range(SEARCH):
        begin = left
        for way in tl.static_range(1, WAYS):
            knot = tl.minimum(begin + way * WAYS ** (SEARCH - 1 - digit), m - 2)
            left = tl.where(tl.load(curve + knot) <= at, knot, left)
    level = tl.load(curve + left)
    value = tl.load(curve + m + left)
    rise = (tl.load(curve + m + left + 1) - value).to(tl.float32)
    rise /= (tl.load(curve + left + 1) - level).to(tl.float32)
    run = at - level
    found = value + rise * run
    return found, tl.load(curve + 2 * m + left) + run * 0.5 * (value + found)


@triton.jit
def store_table(values, table, memory, BINS: tl.constexpr, SHARED: tl.constexpr):
    """Store a table of one float32 per bin, in shared memory if there is any; `look_up` reads it."""
    bins = tl.arange(0, BINS)
    if SHARED:
        bits = values.to(tl.int32, bitcast=True)
        tl.inline_asm_elementwise(_PUT, "=r,r,r", [memory + 4 * bins, bits], tl.int32, is_pure=False, pack=1)
    else:
        tl.store(table + bins, values)
    tl.debug_barrier()


@triton.jit
def map_values(
    x, residual, norm, out, table, memory, offset, n, first, last,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write the corrected values of segments `first` to `last - 1`."""
    rest = look_up(table, memory, BINS - 1, SHARED)
    offsets = block_offsets(CHANNELS, BLOCK)
    scale, shift = norm_of_columns(norm, CHANNELS)
    for start in range(first * SEGMENT, tl.minimum(last * SEGMENT, n), BLOCK):
        at = start + offsets
        a = load_block(x, residual, at, scale, shift, n, RELU, CHANNELS, ADD)
        moved = a * rest + look_up(table, memory, bin_of(a, offset, not RELU), SHARED)
        if out.dtype.element_ty == tl.float16:  # a target may lie outside float16's range
            moved = tl.where(tl.abs(a) < float("inf"), clamp_to_float16(moved), a)
        tl.store(out + at, moved.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def look_up(table, memory, index, SHARED: tl.constexpr):
    """Read entries of the table that `store_table` stored."""
    if SHARED:
        bits = tl.inline_asm_elementwise(_GET, "=r,r", [memory + 4 * index], tl.int32, is_pure=False, pack=1)
        return bits.to(tl.float32, bitcast=True)
    return tl.load(table + index)
