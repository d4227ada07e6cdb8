"""What the Triton kernels of the histogram method are made of: counting values, making a table, mapping values.

Counting is what Triton is bad at: its own histogram, and atomics in global memory, take many times as long as reading
the values. Atomics in shared memory keep up with it, and are a line of PTX away: `_MEMORY_2048` and the like
declare the memory, `_ADD`, `_PUT` and `_GET` use it. Elsewhere (`SHARED` is false: other vendors, Triton's interpreter)
the same kernels use global memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.kernels.bins import BELOW, BINS, FINE, OCTAVES, OUTSIDE, SHIFT, SPAN
from trueup.kernels.triton_norm import scale_of

BLOCK = 4096  # activations in flight a program: four 16-byte loads a thread of float32
SEGMENT = 8192  # activations whose sum is taken at a time: the order of summation must not depend on the parts
WARPS = 8  # nor on the warps: the same in all kernels

_HALF = tl.constexpr(BINS)
_SHIFT = tl.constexpr(SHIFT)
_FINE = tl.constexpr(FINE)
_OCTAVES = tl.constexpr(OCTAVES)
_BELOW = tl.constexpr(BELOW)
_OUTSIDE = tl.constexpr(OUTSIDE)
_SPAN = tl.constexpr(SPAN)

# A variable of its own scope, so that its name can be used again; its address outlives the scope, as PTX has it.
_MEMORY_2048 = tl.constexpr("{ .shared .align 16 .b8 bins[8192]; mov.u32 $0, bins; }")
_MEMORY_4096 = tl.constexpr("{ .shared .align 16 .b8 bins[16384]; mov.u32 $0, bins; }")
_ADD = tl.constexpr("red.shared.add.u32 [$1], 1; mov.u32 $0, 0;")
_PUT = tl.constexpr("st.shared.b32 [$1], $2; mov.u32 $0, 0;")
_GET = tl.constexpr("ld.shared.b32 $0, [$1];")


@triton.jit
def memory_of(BINS: tl.constexpr, SHARED: tl.constexpr):
    """The address of the program's bins in shared memory."""
    if not SHARED:
        return 0
    if BINS == 2048:
        return tl.inline_asm_elementwise(_MEMORY_2048, "=r,r", [0], tl.int32, is_pure=False, pack=1)
    return tl.inline_asm_elementwise(_MEMORY_4096, "=r,r", [0], tl.int32, is_pure=False, pack=1)


@triton.jit
def offset_exponent(curve, m):
    """As `bins.offset_exponent`."""
    first = tl.abs(tl.load(curve + m).to(tl.float32))
    last = tl.abs(tl.load(curve + 2 * m - 1).to(tl.float32))
    exponent = tl.maximum(first, last).to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(exponent - _BELOW, _OUTSIDE), 255 - _OCTAVES)


@triton.jit
def bin_of_zero(RELU: tl.constexpr):
    """The bin of zero."""
    return 0 if RELU else _HALF


@triton.jit
def bin_of(a, offset, SIGNED: tl.constexpr):
    """The bin of each value: as `plain.bin_of`, but that denormal values share that of zero."""
    bits = a.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF if SIGNED else bits
    coarse = size >> 23
    coarse = tl.maximum(tl.minimum(coarse, offset - _OUTSIDE), coarse - _SPAN)
    far = size.to(tl.float32, bitcast=True) + (offset << 23).to(tl.float32, bitcast=True)
    fine = (far.to(tl.int32, bitcast=True) >> _SHIFT) - offset * _FINE
    index = coarse + tl.minimum(fine, _FINE * _OCTAVES)
    return _HALF + tl.where(bits < 0, -index, index) if SIGNED else index


@triton.jit
def tile_of(CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the values of a block are; if there are channels, which lie last, in as many columns."""
    if CHANNELS > 0:
        return (tl.arange(0, BLOCK // CHANNELS) * CHANNELS)[:, None] + tl.arange(0, CHANNELS)[None, :]
    else:  # noqa: RET505  # or Triton would compile both
        return tl.arange(0, BLOCK)


@triton.jit
def scales_of(norm, CHANNELS: tl.constexpr):
    """What each column is multiplied by, and what is added to it then; nothing where there are no channels."""
    if CHANNELS > 0:
        mean, variance, weight, bias, epsilon = norm
        scale, shift = scale_of(mean, variance, weight, bias, epsilon, tl.arange(0, CHANNELS), CHANNELS, True)
        return scale[None, :], shift[None, :]
    else:  # noqa: RET505  # or Triton would compile both
        return 1.0, 0.0


@triton.jit
def load(x, residual, at, scale, shift, n, RELU: tl.constexpr, CHANNELS: tl.constexpr, ADD: tl.constexpr):
    """Some values, after what is to be done with them first. Where there are none, it is 0, also after a norm."""
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if CHANNELS > 0:
        a = tl.fma(a, scale, shift)
        if ADD:
            a += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        a = tl.where(inside, a, 0.0)
    if RELU:  # NaN stays NaN, and becomes the positive one
        a = tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return a


@triton.jit
def count(
    x, residual, norm, sums, counts, memory, offset, n, first, last,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Count the values of some segments, and store what each adds to the mean. Padding is counted as zeros."""
    every = tl.arange(0, BINS)
    if SHARED:
        nothing = tl.zeros([BINS], tl.int32)
        tl.inline_asm_elementwise(_PUT, "=r,r,r", [memory + 4 * every, nothing], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    share = 1.0 / n
    tile = tile_of(CHANNELS, BLOCK)
    scale, shift = scales_of(norm, CHANNELS)
    for segment in range(first, last):
        total = tl.zeros(tile.shape, tl.float32)
        for begin in tl.static_range(0, SEGMENT, BLOCK):
            a = load(x, residual, segment * SEGMENT + begin + tile, scale, shift, n, RELU, CHANNELS, ADD)
            total += a * share  # not the sum: that of huge values would overflow
            index = bin_of(a, offset, not RELU)
            if SHARED:
                tl.inline_asm_elementwise(_ADD, "=r,r", [memory + 4 * index], tl.int32, is_pure=False, pack=1)
            else:
                tl.atomic_add(counts + index, 1)
        tl.store(sums + segment, tl.sum(total))
    tl.debug_barrier()
    if SHARED:
        counted = tl.inline_asm_elementwise(_GET, "=r,r", [memory + 4 * every], tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()  # the memory is used again
    else:
        counted = tl.load(counts + every, volatile=True)
    return counted


@triton.jit
def mean_of(sums, segments, SEGMENTS: tl.constexpr):
    at = tl.arange(0, SEGMENTS)
    return tl.sum(tl.load(sums + at, mask=at < segments, other=0.0, volatile=True))


@triton.jit
def tabulate(
    index, counted, first, mean, curve, n, m, step,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, RELU: tl.constexpr, BINS: tl.constexpr, WAYS: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    """What is added to the values of some bins, `first` being the rank at which they begin.

    The last bin of all, which no value falls into, holds what values are multiplied by.
    """
    after = first + tl.cumsum(counted)
    ranks = tl.full([], n - 1, tl.float64)
    only = tl.where(ranks > 0, 0.0, 0.5)  # a single value is likened to the median
    ranks = tl.maximum(ranks, 1.0)
    level = 1.0 / ranks
    # The sum of the target over the ranks of a bin: its integral from the first to the last, and half of both ends.
    low, below_low = read_curve(curve, (after - counted) * level + only, m, WAYS, SEARCH)
    total = 0.5 * low - below_low * ranks
    high, below_high = read_curve(curve, (after - 1) * level + only, m, WAYS, SEARCH)
    total += 0.5 * high + below_high * ranks
    goal = total.to(tl.float32) / tl.maximum(counted, 1).to(tl.float32)
    if KEEP:
        ends = tl.load(curve + m) + tl.load(curve + 2 * m - 1)
        goal += (mean - (tl.load(curve + 3 * m - 1) * ranks + 0.5 * ends) / n).to(tl.float32)
    moves = tl.abs(mean) < float("inf")  # a row with NaN or infinity does not
    shift = tl.where(moves, step * goal, 0.0)
    if SPARSE:
        shift = tl.where(index == bin_of_zero(RELU), 0.0, shift)
    return tl.where(index == BINS - 1, tl.where(moves, 1.0 - step, 1.0), shift)


@triton.jit
def read_curve(curve, at, m, WAYS: tl.constexpr, SEARCH: tl.constexpr):
    """The quantile function and its integral at some levels.

    The knot to the left is sought by bisection, or among `WAYS` at a time: loads that need not wait for each other.
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
def remember(shift, table, memory, BINS: tl.constexpr, SHARED: tl.constexpr):
    every = tl.arange(0, BINS)
    if SHARED:
        bits = shift.to(tl.int32, bitcast=True)
        tl.inline_asm_elementwise(_PUT, "=r,r,r", [memory + 4 * every, bits], tl.int32, is_pure=False, pack=1)
    else:
        tl.store(table + every, shift)
    tl.debug_barrier()


@triton.jit
def map_values(
    x, residual, norm, out, table, memory, offset, n, first, last,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """What each value of some segments becomes."""
    rest = look_up(table, memory, BINS - 1, SHARED)
    tile = tile_of(CHANNELS, BLOCK)
    scale, shift = scales_of(norm, CHANNELS)
    for start in range(first * SEGMENT, tl.minimum(last * SEGMENT, n), BLOCK):
        at = start + tile
        a = load(x, residual, at, scale, shift, n, RELU, CHANNELS, ADD)
        moved = a * rest + look_up(table, memory, bin_of(a, offset, not RELU), SHARED)
        if out.dtype.element_ty == tl.float16:  # a target may lie beyond what float16 holds
            moved = tl.where(tl.abs(a) < float("inf"), tl.minimum(tl.maximum(moved, -65504.0), 65504.0), a)
        tl.store(out + at, moved.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def look_up(table, memory, index, SHARED: tl.constexpr):
    if SHARED:
        bits = tl.inline_asm_elementwise(_GET, "=r,r", [memory + 4 * index], tl.int32, is_pure=False, pack=1)
        return bits.to(tl.float32, bitcast=True)
    return tl.load(table + index)
