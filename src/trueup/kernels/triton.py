"""The histogram method on a GPU, in Triton.

Two passes over the activations and no host in between: count them into bins, then map each through its bin's entry in
a table. A row that keeps one program busy is corrected whole, by one kernel; longer ones, or few, are cut into parts:
one kernel counts the parts, a second adds the counts of its row, builds the table and maps its part.

Counting is what Triton is bad at: its own histogram takes 26 times as long as reading the values, atomics in global
memory five times. Atomics in shared memory are as fast as reading, and a line of PTX away: `_MEMORY` declares the
memory, `_ADD`, `_PUT` and `_GET` use it. Elsewhere (`shared=False`: other vendors, Triton's interpreter) the same
kernels use global memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.bins import BELOW, BINS, COARSE, COARSE_SHIFT, EXPONENTS, FINE, FINE_SHIFT, WINDOW

BLOCK = 4096  # activations in flight a program: four 16-byte loads a thread of float32
SEGMENT = 8192  # activations whose sum is taken at a time: the order of summation must not depend on the parts
WARPS = 8
TABULATING = {"num_warps": 16, "maxnreg": 64}  # bisection in float64 takes registers that the other passes want
WHOLE = 32768  # a row up to this length is the work of one program
PROGRAMS_PER_PROCESSOR = 4

_HALF = tl.constexpr(BINS)
_COARSE = tl.constexpr(COARSE)
_FINE = tl.constexpr(FINE)
_COARSE_SHIFT = tl.constexpr(COARSE_SHIFT)
_FINE_SHIFT = tl.constexpr(FINE_SHIFT)
_WINDOW = tl.constexpr(WINDOW)
_BELOW = tl.constexpr(BELOW)
_EXPONENTS = tl.constexpr(EXPONENTS)

# A variable of its own scope, so that its name can be used again; its address outlives the scope, as PTX has it.
_MEMORY_2048 = tl.constexpr("{ .shared .align 16 .b8 bins[8192]; mov.u32 $0, bins; }")
_MEMORY_4096 = tl.constexpr("{ .shared .align 16 .b8 bins[16384]; mov.u32 $0, bins; }")
_ADD = tl.constexpr("red.shared.add.u32 [$1], 1; mov.u32 $0, 0;")
_PUT = tl.constexpr("st.shared.b32 [$1], $2; mov.u32 $0, 0;")
_GET = tl.constexpr("ld.shared.b32 $0, [$1];")


def correct_rows(
    x: Tensor,
    curve: Tensor,
    step: float,
    *,
    keep: bool,
    sparse: bool,
    relu: bool,
    parts: int | None = None,
    shared: bool | None = None,
) -> Tensor:
    """Correct rows `(rows, n)`, contiguous, towards a curve `(3, m)`; `trueup.kernels.plain` says what that means.

    `parts` cuts each row into as many; None chooses. `shared` says whether PTX can be used; None asks.
    """
    rows, n = x.shape
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if n == 1 and keep:  # a single value is its own mean
        return x.relu() if relu else x.clone()
    m = curve.shape[1]
    plan = _plan(rows, n, x.device, parts, shared)
    parts, shared = plan.parts, plan.shared
    bins = BINS if relu else 2 * BINS
    sums = x.new_empty(rows * plan.segments, dtype=torch.float32)
    counts = table = sums  # in shared memory, if that is where one program does it all
    if parts > 1 or not shared:
        counts = x.new_empty(rows * parts * bins, dtype=torch.int32)
        table = x.new_empty(rows * bins, dtype=torch.float32)
    if not shared:
        counts.zero_()
    passes = {"RELU": relu, "BINS": bins, "BLOCK": BLOCK, "SEGMENT": SEGMENT, "SHARED": shared}
    tabulating = {"KEEP": keep, "SPARSE": sparse, "SEGMENTS": plan.vector, "SEARCH": (m - 2).bit_length(), **TABULATING}
    if parts == 1:
        _correct_whole[(rows,)](x, out, curve, sums, counts, table, n, m, step, plan.segments, **passes, **tabulating)
        return out
    split = (n, m, plan.segments, plan.each)
    _count_parts[(parts, rows)](x, curve, sums, counts, *split, **passes, num_warps=WARPS)
    _tabulate_rows[(rows,)](
        curve, sums, counts, table, n, m, step, plan.segments, parts, RELU=relu, BINS=bins, **tabulating
    )
    _map_parts[(parts, rows)](x, out, curve, table, *split, **passes, num_warps=WARPS)
    return out


class _Plan(NamedTuple):
    """How the work is shared out: each row in `parts` of `each` out of `segments`, which fit a vector of length
    `vector`; and whether shared memory is used.
    """

    parts: int
    each: int
    segments: int
    vector: int
    shared: bool


@functools.lru_cache(maxsize=1024)  # of the time that a launch takes on the host, this would be a part
def _plan(rows: int, n: int, device: torch.device, parts: int | None, shared: bool | None) -> _Plan:
    shared = device.type == "cuda" and torch.version.cuda is not None if shared is None else shared
    segments = -(-n // SEGMENT)
    if parts is None:
        programs = 1
        if n > WHOLE and device.type == "cuda":
            programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        # One program or several must depend on the length alone: their means are summed in different orders.
        parts = max(-(-programs // rows), 2) if n > WHOLE else 1
    each = -(-segments // min(parts, segments))
    return _Plan(-(-segments // each), each, segments, 1 << (segments - 1).bit_length(), shared)


@triton.jit
def _correct_whole(
    x, out, curve, sums, counts, table, n, m, step, segments,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SEARCH: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    sums += row * segments
    table += row * BINS
    bottom = _bottom(curve, m)
    memory = _memory(BINS, SHARED)
    counted = _count(x, sums, counts + row * BINS, memory, bottom, n, 0, segments, RELU, BINS, BLOCK, SEGMENT, SHARED)
    shift = _tabulate(counted, _mean(sums, segments, SEGMENTS), curve, n, m, step, KEEP, SPARSE, RELU, BINS, SEARCH)
    _keep_table(shift, table, memory, BINS, SHARED)
    _map(x, out + row * n, table, memory, bottom, n, 0, segments, RELU, BINS, BLOCK, SEGMENT, SHARED)


@triton.jit
def _count_parts(
    x, curve, sums, counts, n, m, segments, each,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    counts += (row * tl.num_programs(0) + part) * BINS
    counted = _count(
        x + row * n, sums + row * segments, counts, _memory(BINS, SHARED), _bottom(curve, m), n,
        part * each, tl.minimum((part + 1) * each, segments), RELU, BINS, BLOCK, SEGMENT, SHARED,
    )  # fmt: skip
    if SHARED:
        tl.store(counts + tl.arange(0, BINS), counted)


@triton.jit
def _tabulate_rows(
    curve, sums, counts, table, n, m, step, segments, parts,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, RELU: tl.constexpr, BINS: tl.constexpr, SEGMENTS: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    counts += row * parts * BINS + tl.arange(0, BINS)
    counted = tl.zeros([BINS], tl.int32)
    for part in range(parts):
        counted += tl.load(counts + part * BINS)
    mean = _mean(sums + row * segments, segments, SEGMENTS)
    shift = _tabulate(counted, mean, curve, n, m, step, KEEP, SPARSE, RELU, BINS, SEARCH)
    tl.store(table + row * BINS + tl.arange(0, BINS), shift)


@triton.jit
def _map_parts(
    x, out, curve, table, n, m, segments, each,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    table += row * BINS
    memory = _memory(BINS, SHARED)
    if SHARED:
        _keep_table(tl.load(table + tl.arange(0, BINS)), table, memory, BINS, SHARED)
    _map(
        x + row * n, out + row * n, table, memory, _bottom(curve, m), n, part * each,
        tl.minimum((part + 1) * each, segments), RELU, BINS, BLOCK, SEGMENT, SHARED,
    )  # fmt: skip


@triton.jit
def _memory(BINS: tl.constexpr, SHARED: tl.constexpr):
    """The address of the program's bins in shared memory."""
    if SHARED:
        if BINS == 2048:
            return tl.inline_asm_elementwise(_MEMORY_2048, "=r,r", [0], tl.int32, is_pure=False, pack=1)
        return tl.inline_asm_elementwise(_MEMORY_4096, "=r,r", [0], tl.int32, is_pure=False, pack=1)
    return 0


@triton.jit
def _bottom(curve, m):
    """The exponent at which the window of fine bins begins: 18 octaves below the target's largest value."""
    first = tl.abs(tl.load(curve + m).to(tl.float32))
    last = tl.abs(tl.load(curve + 2 * m - 1).to(tl.float32))
    exponent = tl.maximum(first, last).to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(exponent - _BELOW, 0), _EXPONENTS - _WINDOW)


@triton.jit
def _bin(a, bottom, SIGNED: tl.constexpr):
    """The bin of each value: as `plain.bin_of`."""
    bits = a.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF if SIGNED else bits
    coarse = magnitude >> _COARSE_SHIFT
    coarse = tl.maximum(tl.minimum(coarse, bottom * _COARSE), coarse - _COARSE * _WINDOW)
    fine = tl.minimum(tl.maximum((magnitude >> _FINE_SHIFT) - bottom * _FINE, 0), _FINE * _WINDOW)
    index = coarse + fine
    return _HALF + tl.where(bits < 0, -index, index) if SIGNED else index


@triton.jit
def _load(x, start, n, RELU: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    if RELU:  # NaN stays NaN, and becomes the positive one
        a = tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return at, a


@triton.jit
def _count(
    x, sums, counts, memory, bottom, n, first, last,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Count the values of some segments, and store the mean that each contributes. Padding counts as zeros."""
    if SHARED:
        tl.inline_asm_elementwise(
            _PUT,
            "=r,r,r",
            [memory + 4 * tl.arange(0, BINS), tl.zeros([BINS], tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()
    scale = 1.0 / n
    for segment in range(first, last):
        total = tl.zeros([BLOCK], tl.float32)
        for offset in tl.static_range(0, SEGMENT, BLOCK):
            _, a = _load(x, segment * SEGMENT + offset, n, RELU, BLOCK)
            total += a * scale  # not the sum: that of huge values would overflow
            index = _bin(a, bottom, not RELU)
            if SHARED:
                tl.inline_asm_elementwise(_ADD, "=r,r", [memory + 4 * index], tl.int32, is_pure=False, pack=1)
            else:
                tl.atomic_add(counts + index, 1)
        tl.store(sums + segment, tl.sum(total))
    tl.debug_barrier()
    at = tl.arange(0, BINS)
    if SHARED:
        counted = tl.inline_asm_elementwise(_GET, "=r,r", [memory + 4 * at], tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()  # the memory is used again
    else:
        counted = tl.load(counts + at, volatile=True)
    return counted


@triton.jit
def _mean(sums, segments, SEGMENTS: tl.constexpr):
    at = tl.arange(0, SEGMENTS)
    return tl.sum(tl.load(sums + at, mask=at < segments, other=0.0, volatile=True))


@triton.jit
def _tabulate(
    counted, mean, curve, n, m, step,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, RELU: tl.constexpr, BINS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """From counts to what is added to the values of a bin; in the last, an empty one, what values are multiplied by."""
    index = tl.arange(0, BINS)
    zero = 0 if RELU else _HALF
    counted = tl.where(index == zero, 0, counted)
    counted = tl.where(index == zero, n - tl.sum(counted), counted)  # not the padding
    after = tl.cumsum(counted)
    ranks = tl.full([], n - 1, tl.float64)
    only = tl.where(ranks > 0, 0.0, 0.5)  # a single value is likened to the median
    ranks = tl.maximum(ranks, 1.0)
    level = 1.0 / ranks
    # The sum of the target over the ranks of a bin: its integral from the first to the last, and half of both ends.
    low, below_low = _read(curve, (after - counted) * level + only, m, SEARCH)
    total = 0.5 * low - below_low * ranks
    high, below_high = _read(curve, (after - 1) * level + only, m, SEARCH)
    total += 0.5 * high + below_high * ranks
    goal = total.to(tl.float32) / tl.maximum(counted, 1).to(tl.float32)
    if KEEP:
        ends = tl.load(curve + m) + tl.load(curve + 2 * m - 1)
        goal += (mean - (tl.load(curve + 3 * m - 1) * ranks + 0.5 * ends) / n).to(tl.float32)
    moves = tl.abs(mean) < float("inf")
    shift = tl.where(moves, step * goal, 0.0)
    if SPARSE:
        shift = tl.where(index == zero, 0.0, shift)
    return tl.where(index == BINS - 1, tl.where(moves, 1.0 - step, 1.0), shift)


@triton.jit
def _keep_table(shift, table, memory, BINS: tl.constexpr, SHARED: tl.constexpr):
    at = tl.arange(0, BINS)
    if SHARED:
        found = shift.to(tl.int32, bitcast=True)
        tl.inline_asm_elementwise(_PUT, "=r,r,r", [memory + 4 * at, found], tl.int32, is_pure=False, pack=1)
    else:
        tl.store(table + at, shift)
    tl.debug_barrier()


@triton.jit
def _read(curve, at, m, SEARCH: tl.constexpr):
    """The quantile function and its integral at some levels, by bisection for the knot to the left."""
    left = tl.zeros_like(at).to(tl.int32)
    for bit in tl.static_range(SEARCH):
        middle = tl.minimum(left + (1 << (SEARCH - 1 - bit)), m - 2)
        left = tl.where(tl.load(curve + middle) <= at, middle, left)
    level = tl.load(curve + left)
    value = tl.load(curve + m + left)
    rise = (tl.load(curve + m + left + 1) - value).to(tl.float32)
    rise /= (tl.load(curve + left + 1) - level).to(tl.float32)
    run = at - level
    found = value + rise * run
    return found, tl.load(curve + 2 * m + left) + run * 0.5 * (value + found)


@triton.jit
def _map(
    x, out, table, memory, bottom, n, first, last,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """What each value of some segments becomes."""
    if SHARED:
        rest = tl.inline_asm_elementwise(_GET, "=r,r", [memory + 4 * (BINS - 1)], tl.int32, is_pure=False, pack=1)
        rest = rest.to(tl.float32, bitcast=True)
    else:
        rest = tl.load(table + BINS - 1)
    for start in range(first * SEGMENT, tl.minimum(last * SEGMENT, n), BLOCK):
        at, a = _load(x, start, n, RELU, BLOCK)
        index = _bin(a, bottom, not RELU)
        if SHARED:
            found = tl.inline_asm_elementwise(_GET, "=r,r", [memory + 4 * index], tl.int32, is_pure=False, pack=1)
            shift = found.to(tl.float32, bitcast=True)
        else:
            shift = tl.load(table + index)
        moved = a * rest + shift
        if out.dtype.element_ty == tl.float16:  # a target may lie beyond what float16 holds
            moved = tl.where(tl.abs(a) < float("inf"), tl.minimum(tl.maximum(moved, -65504.0), 65504.0), a)
        tl.store(out + at, moved.to(out.dtype.element_ty), mask=at < n)
