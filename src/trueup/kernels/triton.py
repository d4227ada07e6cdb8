"""The histogram method on a GPU, in Triton.

Two passes over the activations and no host in between: count them into bins, then map each through its bin's entry in
a table. Where rows are many and not too long, one program does all of that for a row. Else rows are cut into parts,
and there are three kernels: to count the parts, to make a table of each row's counts, to map the parts.

Counting is what Triton is bad at: its own histogram, and atomics in global memory, take many times as long as reading
the values. Atomics in shared memory keep up with it, and are a line of PTX away: `_MEMORY_2048` and the like
declare the memory, `_ADD`, `_PUT` and `_GET` use it. Elsewhere (`shared=False`: other vendors, Triton's interpreter)
the same kernels use global memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.bins import BELOW, BINS, FINE, OCTAVES, OUTSIDE, SHIFT, SPAN

BLOCK = 4096  # activations in flight a program: four 16-byte loads a thread of float32
SEGMENT = 8192  # activations whose sum is taken at a time: the order of summation must not depend on the parts
WARPS = 8  # nor on the warps: the same in all kernels
WHOLE = 131072  # a row up to this length may be the work of one program
PARTS = 32  # at most: their counts have to be added
PROGRAMS_PER_PROCESSOR = 4
SLICES = 4  # in which a row's table is made
REGISTERS = 64  # a thread, where the table is made beside the passes, which want many threads

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
    """As `plain.correct_rows`, but that denormal values count as zeros.

    `parts` cuts each row into as many; None chooses. `shared` says whether PTX can be used; None asks.
    """
    rows, n = x.shape
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if n == 1 and keep:  # a single value is its own mean
        return x.relu() if relu else x.clone()
    m = curve.shape[1]
    aligned = x.data_ptr() % 16 == 0 and curve.data_ptr() % 16 == 0
    plan = _plan(rows, n, m, x.dtype, x.device, relu, keep, sparse, aligned, parts, shared)
    sums = x.new_empty(rows * plan.segments, dtype=torch.float32)
    counts = table = sums  # in shared memory, if that is where one program does it all
    if plan.parts > 1 or not plan.shared:
        counts = x.new_empty(rows * plan.parts * plan.bins, dtype=torch.int32)
        table = x.new_empty(rows * plan.bins, dtype=torch.float32)
    if not plan.shared:
        counts.zero_()
    if plan.parts == 1:
        plan.correct_whole(x, curve, out, sums, counts, table, n, m, plan.segments, step)
    else:
        plan.count_parts(x, curve, sums, counts, n, m, plan.segments, plan.each)
        plan.tabulate_rows(curve, sums, counts, table, n, m, plan.segments, plan.parts, step)
        plan.map_parts(x, curve, out, table, n, m, plan.segments, plan.each)
    return out


def quantile_rows(rows: Tensor, levels: Tensor, *, shared: bool | None = None) -> Tensor:
    """As `plain.quantile_rows`. `shared` says whether PTX can be used; None asks."""
    batch, n = rows.shape
    out = rows.new_empty(batch, len(levels))
    if shared is None:
        shared = _has_ptx(rows.device)
    low, high = rows.aminmax(dim=1)
    segments = -(-n // SEGMENT)
    sums = rows.new_empty(batch * segments)
    ends = sums if shared else rows.new_zeros(batch * 2 * BINS, dtype=torch.int32)
    _quantile_rows[(batch,)](
        rows, low, high, levels, out, sums, ends, n, len(levels), segments,
        2 * BINS, BLOCK, SEGMENT, shared, 1 << (segments - 1).bit_length(), 1024, num_warps=WARPS,
    )  # fmt: skip
    return out


class _Plan(NamedTuple):
    """How the work is shared out, each row in `parts` of `each` of its `segments`, and the kernels that do it."""

    parts: int
    each: int
    segments: int
    bins: int
    shared: bool
    correct_whole: _Launch
    count_parts: _Launch
    tabulate_rows: _Launch
    map_parts: _Launch


@functools.lru_cache(maxsize=1024)
def _plan(
    rows: int,
    n: int,
    m: int,
    _dtype: torch.dtype,
    device: torch.device,
    relu: bool,
    keep: bool,
    sparse: bool,
    _aligned: bool,
    parts: int | None,
    shared: bool | None,
) -> _Plan:
    """The plan for all that Triton may specialise a kernel on, so that what it compiles can be kept there."""
    if shared is None:
        shared = _has_ptx(device)
    segments = -(-n // SEGMENT)
    if parts is None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        programs = PROGRAMS_PER_PROCESSOR * processors
        parts = 1 if rows >= processors and n <= WHOLE else -(-programs // rows)
    each = -(-segments // min(parts, segments, PARTS))
    parts = -(-segments // each)
    bins = BINS if relu else 2 * BINS
    passes = (relu, bins, BLOCK, SEGMENT, shared)
    rule = (keep, sparse, 1 << (segments - 1).bit_length())
    bits = (m - 2).bit_length()
    return _Plan(
        parts,
        each,
        segments,
        bins,
        shared,
        _Launch(_correct_whole, (rows, 1, 1), (*passes, *rule, 2, bits), maxnreg=REGISTERS),
        _Launch(_count_parts, (parts, rows, 1), passes),
        _Launch(_tabulate_rows, (SLICES, rows, 1), (relu, bins, bins // SLICES, SEGMENT, *rule, 4, -(-bits // 2))),
        _Launch(_map_parts, (parts, rows, 1), passes),
    )


def _has_ptx(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None


class _Launch:
    """`kernel[grid](*arguments, *constants)`, always with arguments that Triton would compile the same code for.

    To find that out again each time takes Triton longer, on the host, than most layers take on a GPU.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], constants: tuple[Any, ...], **options: int) -> None:
        self.kernel, self.grid, self.constants, self.options = kernel, grid, constants, options
        self.compiled: Any = None

    def __call__(self, *arguments: Any) -> None:
        if self.compiled is None:
            compiled = self.kernel[self.grid](*arguments, *self.constants, num_warps=WARPS, **self.options)
            if compiled is not None:  # as it is in the interpreter
                self.compiled = compiled[self.grid]
        else:
            self.compiled(*arguments, *self.constants)


@triton.jit
def _correct_whole(
    x, curve, out, sums, counts, table, n, m, segments, step,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, SEGMENTS: tl.constexpr, WAYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    sums += row * segments
    table += row * BINS
    offset = _offset_exponent(curve, m)
    memory = _memory(BINS, SHARED)
    counted = _count(x, sums, counts + row * BINS, memory, offset, n, 0, segments, RELU, BINS, BLOCK, SEGMENT, SHARED)
    index = tl.arange(0, BINS)
    counted += tl.where(index == _zero(RELU), n - segments * SEGMENT, 0)
    mean = _mean(sums, segments, SEGMENTS)
    shift = _tabulate(index, counted, 0, mean, curve, n, m, step, KEEP, SPARSE, RELU, BINS, WAYS, SEARCH)
    _remember(shift, table, memory, BINS, SHARED)
    _map(x, out + row * n, table, memory, offset, n, 0, segments, RELU, BINS, BLOCK, SEGMENT, SHARED)


@triton.jit
def _count_parts(
    x, curve, sums, counts, n, m, segments, each,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    counts += (row * tl.num_programs(0) + part) * BINS
    counted = _count(
        x + row * n, sums + row * segments, counts, _memory(BINS, SHARED), _offset_exponent(curve, m), n,
        part * each, tl.minimum((part + 1) * each, segments), RELU, BINS, BLOCK, SEGMENT, SHARED,
    )  # fmt: skip
    if SHARED:
        tl.store(counts + tl.arange(0, BINS), counted)


@triton.jit
def _tabulate_rows(
    curve, sums, counts, table, n, m, segments, parts, step,
    RELU: tl.constexpr, BINS: tl.constexpr, SLICE: tl.constexpr, SEGMENT: tl.constexpr,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, SEGMENTS: tl.constexpr, WAYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
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
    counted -= tl.where(index == _zero(RELU), padding, 0)
    first = tl.sum(before) - tl.where(begin > _zero(RELU), padding, 0)
    mean = _mean(sums + row * segments, segments, SEGMENTS)
    shift = _tabulate(index, counted, first, mean, curve, n, m, step, KEEP, SPARSE, RELU, BINS, WAYS, SEARCH)
    tl.store(table + row * BINS + index, shift)


@triton.jit
def _map_parts(
    x, curve, out, table, n, m, segments, each,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    # Backwards: what was counted last may still be in the cache.
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    table += row * BINS
    memory = _memory(BINS, SHARED)
    if SHARED:
        _remember(tl.load(table + tl.arange(0, BINS)), table, memory, BINS, SHARED)
    _map(
        x + row * n, out + row * n, table, memory, _offset_exponent(curve, m), n,
        part * each, tl.minimum((part + 1) * each, segments), RELU, BINS, BLOCK, SEGMENT, SHARED,
    )  # fmt: skip


@triton.jit
def _quantile_rows(
    x, low, high, levels, out, sums, ends, n, m, segments,
    BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr, SEGMENTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    least = tl.load(low + row)
    most = tl.load(high + row)
    sums += row * segments
    ends += row * BINS
    exponent = tl.maximum(-least, most).to(tl.int32, bitcast=True) >> 23
    offset = tl.minimum(tl.maximum(exponent - (_OCTAVES - 2), _OUTSIDE), 255 - _OCTAVES)
    memory = _memory(BINS, SHARED)
    counted = _count(x + row * n, sums, ends, memory, offset, n, 0, segments, False, BINS, BLOCK, SEGMENT, SHARED)
    index = tl.arange(0, BINS)
    counted += tl.where(index == _HALF, n - segments * SEGMENT, 0)
    finite = tl.abs(_mean(sums, segments, SEGMENTS)) < float("inf")
    _remember(
        tl.cumsum(counted).to(tl.float32, bitcast=True), ends.to(tl.pointer_type(tl.float32)), memory, BINS, SHARED
    )
    for begin in range(0, m, LEVELS):
        at = begin + tl.arange(0, LEVELS)
        position = tl.load(levels + at, mask=at < m, other=0.0) * (n - 1)
        rank = position.to(tl.int32)
        lower = _order_statistic(rank, least, most, ends, memory, offset, n, SHARED)
        upper = _order_statistic(tl.minimum(rank + 1, n - 1), least, most, ends, memory, offset, n, SHARED)
        value = lower + (position - rank) * (upper - lower)
        tl.store(out + row * m + at, tl.where(finite, value, float("nan")).to(tl.float32), mask=at < m)


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
    far = _edge(tl.abs(side) + 1, offset)
    left = tl.where(side < 0, -far, near).to(tl.float64)
    right = tl.where(side < 0, -near, far).to(tl.float64)
    value = tl.minimum(tl.maximum(left + share * (right - left), least), most)
    return tl.where(rank == 0, least, tl.where(rank == n - 1, most, value))


@triton.jit
def _end(ends, memory, index, SHARED: tl.constexpr):
    """How many values are in the bins up to one, and in that."""
    if SHARED:
        count = tl.inline_asm_elementwise(_GET, "=r,r", [memory + 4 * index], tl.int32, is_pure=False, pack=1)
    else:
        count = tl.load(ends + index)
    return count


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


@triton.jit
def _memory(BINS: tl.constexpr, SHARED: tl.constexpr):
    """The address of the program's bins in shared memory."""
    if not SHARED:
        return 0
    if BINS == 2048:
        return tl.inline_asm_elementwise(_MEMORY_2048, "=r,r", [0], tl.int32, is_pure=False, pack=1)
    return tl.inline_asm_elementwise(_MEMORY_4096, "=r,r", [0], tl.int32, is_pure=False, pack=1)


@triton.jit
def _offset_exponent(curve, m):
    """As `bins.offset_exponent`."""
    first = tl.abs(tl.load(curve + m).to(tl.float32))
    last = tl.abs(tl.load(curve + 2 * m - 1).to(tl.float32))
    exponent = tl.maximum(first, last).to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(exponent - _BELOW, _OUTSIDE), 255 - _OCTAVES)


@triton.jit
def _zero(RELU: tl.constexpr):
    """The bin of zero."""
    return 0 if RELU else _HALF


@triton.jit
def _bin(a, offset, SIGNED: tl.constexpr):
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
def _load(x, start, n, RELU: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    if RELU:  # NaN stays NaN, and becomes the positive one
        a = tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return at, a


@triton.jit
def _count(
    x, sums, counts, memory, offset, n, first, last,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Count the values of some segments, and store what each adds to the mean. Padding is counted as zeros."""
    every = tl.arange(0, BINS)
    if SHARED:
        nothing = tl.zeros([BINS], tl.int32)
        tl.inline_asm_elementwise(_PUT, "=r,r,r", [memory + 4 * every, nothing], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    share = 1.0 / n
    for segment in range(first, last):
        total = tl.zeros([BLOCK], tl.float32)
        for begin in tl.static_range(0, SEGMENT, BLOCK):
            _, a = _load(x, segment * SEGMENT + begin, n, RELU, BLOCK)
            total += a * share  # not the sum: that of huge values would overflow
            index = _bin(a, offset, not RELU)
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
def _mean(sums, segments, SEGMENTS: tl.constexpr):
    at = tl.arange(0, SEGMENTS)
    return tl.sum(tl.load(sums + at, mask=at < segments, other=0.0, volatile=True))


@triton.jit
def _tabulate(
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
    low, below_low = _read(curve, (after - counted) * level + only, m, WAYS, SEARCH)
    total = 0.5 * low - below_low * ranks
    high, below_high = _read(curve, (after - 1) * level + only, m, WAYS, SEARCH)
    total += 0.5 * high + below_high * ranks
    goal = total.to(tl.float32) / tl.maximum(counted, 1).to(tl.float32)
    if KEEP:
        ends = tl.load(curve + m) + tl.load(curve + 2 * m - 1)
        goal += (mean - (tl.load(curve + 3 * m - 1) * ranks + 0.5 * ends) / n).to(tl.float32)
    moves = tl.abs(mean) < float("inf")  # a row with NaN or infinity does not
    shift = tl.where(moves, step * goal, 0.0)
    if SPARSE:
        shift = tl.where(index == _zero(RELU), 0.0, shift)
    return tl.where(index == BINS - 1, tl.where(moves, 1.0 - step, 1.0), shift)


@triton.jit
def _read(curve, at, m, WAYS: tl.constexpr, SEARCH: tl.constexpr):
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
def _remember(shift, table, memory, BINS: tl.constexpr, SHARED: tl.constexpr):
    every = tl.arange(0, BINS)
    if SHARED:
        bits = shift.to(tl.int32, bitcast=True)
        tl.inline_asm_elementwise(_PUT, "=r,r,r", [memory + 4 * every, bits], tl.int32, is_pure=False, pack=1)
    else:
        tl.store(table + every, shift)
    tl.debug_barrier()


@triton.jit
def _map(
    x, out, table, memory, offset, n, first, last,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """What each value of some segments becomes."""
    rest = _look_up(table, memory, BINS - 1, SHARED)
    for start in range(first * SEGMENT, tl.minimum(last * SEGMENT, n), BLOCK):
        at, a = _load(x, start, n, RELU, BLOCK)
        moved = a * rest + _look_up(table, memory, _bin(a, offset, not RELU), SHARED)
        if out.dtype.element_ty == tl.float16:  # a target may lie beyond what float16 holds
            moved = tl.where(tl.abs(a) < float("inf"), tl.minimum(tl.maximum(moved, -65504.0), 65504.0), a)
        tl.store(out + at, moved.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _look_up(table, memory, index, SHARED: tl.constexpr):
    if SHARED:
        bits = tl.inline_asm_elementwise(_GET, "=r,r", [memory + 4 * index], tl.int32, is_pure=False, pack=1)
        return bits.to(tl.float32, bitcast=True)
    return tl.load(table + index)
