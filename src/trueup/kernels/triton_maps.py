"""The rule of evidence on a GPU, in Triton: `channels.realign` and `channels.moments` in two readings and one writing.

Maps that are one segment, a strip of few rows, are done whole, in one kernel. Of larger ones a program does a stretch,
and sums over segments go through memory. What is added up, and in what order, does not depend on the batch. But how
many programs there are does, and so how many segments each does, one below the other, and of how many channels: few
images want many programs, and many want what is read to be read once. What the kernels are made of is in
`triton_strips`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.layout import channels_lie_last
from trueup.kernels.norm import Norm
from trueup.kernels.triton_launch import Launch, aligned, overlap, overlaps, processors
from trueup.kernels.triton_norm import scale_of
from trueup.kernels.triton_strips import (
    coefficients,
    columns_of,
    enter,
    part_of,
    pivot_of,
    plain_sums_of,
    sums_of,
    tell,
    write_plain_rows,
    write_rows,
)

ROWS = 28  # of a segment, at most; even, as they are taken two at a time
FEWEST = 8  # rows that a program writes, about, where there are not enough programs
ENOUGH = 12  # programs, for each processor
WHOLE = 56  # rows of a map that is one segment, at most, if it is one strip
LINE = 128  # bytes that memory gives at once: the channels of a program, where they lie last
HALVED = 2  # times, at most, that what a program and each of its threads does is halved, where programs are few
COLUMNS = {True: 16, False: 64}  # of a strip, at most: where channels lie last, and where they do not

# Sums that are kept: the pivot, and of a map without it those of both bands and of their squares; to measure, also of
# the map's squares and of the high band's absolute values.
_SUMS = 5
_ALL_SUMS = 7


def realign(
    x: Tensor,
    reference: Tensor,
    openness: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
    norm: Norm | None = None,
) -> Tensor:
    """As `channels.realign`, of float32, bfloat16 or float16 `(batch, channels, ...)`; it keeps the layout.

    A `norm` is applied to `x` before, a `residual` like `x` is added to the result, and `relu` applied to that. It is
    rounded once; so what is not moved comes out as if it were done in steps, unless there is a norm. It does not depend
    on the batch to the last bit.
    """
    dense = _in_order(x)
    out = torch.empty_like(dense)
    if residual is not None and residual.stride() != dense.stride():
        residual = torch.empty_like(dense).copy_(residual)
    realign_maps(dense, reference, openness, out, residual, relu, norm)
    return out if dense is x or dense.stride() == x.stride() else torch.empty_like(x).copy_(out)


def moments(x: Tensor, bands: bool) -> Tensor:
    """As `channels.moments` `(batch, 2 or 5, channels)`: mean, variance; with bands, the variances of both, and the
    mean absolute value of the high one.
    """
    return measure_maps(_in_order(x), bands)


def realign_maps(
    x: Tensor,
    reference: Tensor,
    openness: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    relu: bool = False,
    norm: Norm | None = None,
    *,
    split: bool | None = None,
    stretches: int | None = None,
    halved: int | None = None,
) -> None:
    """As `realign`, into `out`; all are of the same layout as `x`: contiguous, or with the channels last.

    `split` says whether programs share out a map, `stretches` how many, at most, do one strip, and `halved` how often
    the channels of each are halved; None chooses.
    """
    if x.numel() == 0:
        return
    gate = x if openness is None else aligned(openness.float().contiguous())
    before = (x, x, x, x) if norm is None else tuple(aligned(tensor.contiguous()) for tensor in norm.tensors)
    epsilon = 0.0 if norm is None else norm.epsilon
    tensors = (aligned(reference.contiguous()), gate, x if residual is None else aligned(residual), out)
    ends = (openness is not None, residual is not None, relu, norm is not None)
    dtypes = (reference.dtype, *(tensor.dtype for tensor in before))
    plan = _plan(_shape(x), x.dtype, x.device, reference.shape[1] == 3, ends, dtypes, split, stretches, halved)
    if plan.split:
        sums = x.new_empty(plan.sums, dtype=torch.float32)
        plan.sum_segments(x, sums, *plan.sizes, plan.each, plan.segments, plan.run)
        plan.finish(x, sums, *tensors, *before, epsilon, *plan.sizes, plan.written, plan.segments)
    else:
        plan.whole(x, *tensors, *before, epsilon, *plan.sizes, plan.each, plan.segments)


def measure_maps(
    x: Tensor, bands: bool, *, split: bool | None = None, stretches: int | None = None, halved: int | None = None
) -> Tensor:
    """As `moments`, of contiguous `x`, or with the channels last; how it is shared out as for `realign_maps`."""
    found = x.new_empty((x.shape[0], 5 if bands else 2, x.shape[1]), dtype=torch.float32)
    if x.numel() == 0:
        return found
    plan = _plan(_shape(x), x.dtype, x.device, bands, None, (), split, stretches, halved)
    if plan.split:
        sums = x.new_empty(plan.sums, dtype=torch.float32)
        plan.sum_segments(x, sums, *plan.sizes, plan.each, plan.segments, plan.run)
        plan.finish(sums, found, *plan.sizes, plan.segments)
    else:
        plan.whole(x, found, *plan.sizes, plan.each, plan.segments)
    return found


def _in_order(x: Tensor) -> Tensor:
    """As it is, if maps are contiguous or have their channels last, and else a copy, as each image alone would lie."""
    if x.is_contiguous() or channels_lie_last(x):
        return aligned(x)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_lie_last(x[:1]) else x.contiguous()


class _Shape(NamedTuple):
    sizes: tuple[int, ...]
    last: bool  # whether the channels lie last, not second


def _shape(x: Tensor) -> _Shape:
    return _Shape(tuple(x.shape), not x.is_contiguous())


class _Plan(NamedTuple):
    """How the work is shared out, and the kernels that do it: one, or two with `sums` numbers in between."""

    split: bool
    sums: int
    sizes: tuple[int, ...]
    each: int  # rows of a segment
    segments: int
    run: int  # segments that a program adds up, one by one
    written: int  # rows that a program writes
    whole: Launch
    sum_segments: Launch
    finish: Launch


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: _Shape,
    dtype: torch.dtype,
    device: torch.device,
    bands: bool,
    ends: tuple[bool, bool, bool, bool] | None,
    _dtypes: tuple[torch.dtype, ...],
    split: bool | None,
    stretches: int | None,
    halved: int | None,
) -> _Plan:
    """The plan for all that Triton may specialise a kernel on, so that what it compiles can be kept there.

    `ends` says whether there is a gate, something to add, a ReLU, and a norm; None that maps are measured only.
    """
    (batch, channels, *sides), last = shape
    n = 1
    for side in sides:
        n *= side
    width = sides[-1] if bands else min(_power(n), COLUMNS[last])  # without bands, rows are what we make them
    rows = -(-n // width)
    pairs = _power(min(-(-width // 2), COLUMNS[last] // 2))
    strips = -(-width // (2 * pairs))
    longer = 1 if bands else 4  # a row is less work without them
    shared = rows > 2 and (strips > 1 or rows > longer * WHOLE)
    parts = max(2, -(-rows // (longer * ROWS))) if shared else 1
    each = 2 * -(-rows // (2 * parts))
    segments = strips * parts
    if split is None:
        split = segments > 1
    some = 16 // dtype.itemsize if last else max(1, pairs // 8)  # pairs of a thread
    maps = LINE // dtype.itemsize if last else 64 * some // pairs
    if halved is None:
        # Half the channels, where they lie last, are half a line of memory, and else as quick to read.
        programs, few = -(-channels // maps) * segments * batch, ((1 if split else 2) if last else 8)
        halved = sum(programs << times <= few * processors(device) for times in range(1, HALVED + 1))
    halved = min(halved, HALVED, some.bit_length() - (2 if last else 1))  # two values a thread are left, or one
    some, maps = some >> halved, min(_power(channels), maps >> halved)
    tiles = -(-channels // maps)
    if stretches is None:
        stretches = -(-ENOUGH * processors(device) // (tiles * strips * batch))
    run = -(-parts // stretches)
    written = 2 * -(-rows // (2 * min(stretches, -(-rows // FEWEST))))
    constants = (maps, pairs, last, channels % maps == 0, bands)
    warps = max(1, min(8, maps * pairs // (32 * some)))
    # As few registers as do without putting much aside: the more programs at once, the better they hide each other's
    # waiting for memory.
    registers = (88 + 10 * some if bands else 64 + 4 * some) if last else 64 + 8 * some + (0 if split else 32)
    # Sums that are multiplied and added in one instruction here and in two there would differ in the last bit.
    options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}

    def launch(kernel: Any, programs: int, *more: bool) -> Launch:
        early = overlaps(device, programs)
        pdl = {"launch_pdl": True} if early else {}
        return Launch(kernel, (programs, 1, 1), (*constants, early, *more), **options, **pdl)

    measure, rule, strip = ends is None, ends or (), tiles * strips * batch
    return _Plan(
        split,
        batch * segments * (_ALL_SUMS if measure else _SUMS) * channels,
        (channels, n, width, rows, strips),
        each,
        segments,
        run,
        written,
        launch(_measure_whole if measure else _realign_whole, tiles * batch, *rule),
        launch(_sum_segments, strip * -(-parts // run), measure),
        launch(_tell_sums, tiles * batch) if measure else launch(_realign_rows, strip * -(-rows // written), *rule),
    )


def _power(n: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (n - 1).bit_length()


@triton.jit
def _realign_whole(
    x, usual, openness, residual, out, norm_mean, norm_variance, norm_weight, norm_bias, epsilon,
    channels, n, width, rows, strips, each, segments,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    RELU: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    image, _only, channel = part_of(channels, 1, MAPS)
    begin = image * channels * n
    x += begin
    gate = tl.load(openness + image).to(tl.float32) if GATED else 1.0
    pivot = pivot_of(x, channel, channels, n, width, LAST, EVEN)
    wanted = tl.where(gate > 0, segments, 0) if GATED else segments
    low, high, low2, high2, _, _ = _sums_of_all(
        x, channel, pivot, channels, n, width, rows, strips, each, wanted, MAPS, PAIRS, LAST, EVEN, BANDS, False
    )
    scale, shift = scale_of(norm_mean, norm_variance, norm_weight, norm_bias, epsilon, channel, channels, NORM)
    start, gain, gain_of_mean, moves = coefficients(
        usual, gate, channel, pivot, low, high, low2, high2, scale, shift, channels, n, BANDS, GATED
    )
    for done in range(segments):  # backwards: what was read last may still be in the cache
        top, bottom, column = _segment(segments - 1 - done, rows, strips, each, PAIRS, LAST)
        _write(
            x, residual + begin, out + begin, channel, top, bottom, column, start, gain, gain_of_mean, moves,
            channels, n, width, rows, PAIRS, LAST, EVEN, BANDS, ADD, RELU,
        )  # fmt: skip


@triton.jit
def _measure_whole(
    x, found, channels, n, width, rows, strips, each, segments,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    image, _only, channel = part_of(channels, 1, MAPS)
    x += image * channels * n
    pivot = pivot_of(x, channel, channels, n, width, LAST, EVEN)
    low, high, low2, high2, square, rough = _sums_of_all(
        x, channel, pivot, channels, n, width, rows, strips, each, segments, MAPS, PAIRS, LAST, EVEN, BANDS, True
    )
    tell(found, image, channel, pivot, low, high, low2, high2, square, rough, channels, n, BANDS)


@triton.jit
def _sums_of_all(
    x, channel, pivot, channels, n, width, rows, strips, each, segments,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """`sums_of`, over some segments."""
    nothing = tl.zeros([MAPS], tl.float32)
    low, high, low2, high2, square, rough = nothing, nothing, nothing, nothing, nothing, nothing
    for segment in range(segments):
        top, bottom, column = _segment(segment, rows, strips, each, PAIRS, LAST)
        if BANDS:
            state = enter(x, channel, top, column, channels, n, width, PAIRS, LAST, EVEN)
            sums, _ = sums_of(
                x, state, channel, top, bottom, column, pivot, channels, n, width, rows,
                MAPS, PAIRS, LAST, EVEN, ALL,
            )  # fmt: skip
        else:
            sums = plain_sums_of(
                x, channel, top, bottom, column, pivot, channels, n, width, MAPS, PAIRS, LAST, EVEN
            )  # fmt: skip
        low, high, low2, high2 = low + sums[0], high + sums[1], low2 + sums[2], high2 + sums[3]
        square, rough = square + sums[4], rough + sums[5]
    return low, high, low2, high2, square, rough


@triton.jit
def _segment(segment, rows, strips, each, PAIRS: tl.constexpr, LAST: tl.constexpr):
    """The first of so many rows of a strip, the one after their last, and the first of each pair of its columns."""
    part = segment // strips
    return part * each, tl.minimum(part * each + each, rows), columns_of(segment - part * strips, PAIRS, LAST)


@triton.jit(do_not_specialize=["run"])  # what depends on the batch must not lead to other code
def _sum_segments(
    x, sums, channels, n, width, rows, strips, each, segments, run,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The sums of `run` segments, one below the other."""
    overlap(EARLY)
    kept: tl.constexpr = 7 if ALL else 5
    image, stretch, channel = part_of(channels, strips * tl.cdiv(segments // strips, run), MAPS)
    x += image * channels * n
    pivot = pivot_of(x, channel, channels, n, width, LAST, EVEN)
    inside = channel < channels
    above = stretch // strips  # stretches of the same strip
    strip, first = stretch - above * strips, above * run
    column = columns_of(strip, PAIRS, LAST)
    if BANDS:
        state = enter(x, channel, first * each, column, channels, n, width, PAIRS, LAST, EVEN)
    sums += (image * segments + first * strips + strip) * kept * channels + channel
    for part in range(first, tl.minimum(first + run, segments // strips)):
        top = part * each
        bottom = tl.minimum(top + each, rows)
        if BANDS:
            found, state = sums_of(
                x, state, channel, top, bottom, column, pivot, channels, n, width, rows,
                MAPS, PAIRS, LAST, EVEN, ALL,
            )  # fmt: skip
        else:
            found = plain_sums_of(
                x, channel, top, bottom, column, pivot, channels, n, width, MAPS, PAIRS, LAST, EVEN
            )  # fmt: skip
        tl.store(sums, pivot, mask=inside)
        for k in tl.static_range(kept - 1):
            tl.store(sums + (k + 1) * channels, found[k], mask=inside)
        sums += strips * kept * channels


@triton.jit(do_not_specialize=["written"])
def _realign_rows(
    x, sums, usual, openness, residual, out, norm_mean, norm_variance, norm_weight, norm_bias, epsilon,
    channels, n, width, rows, strips, written, segments,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    RELU: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """So many rows of a strip, `written`, by the sums of all segments."""
    overlap(EARLY)
    image, stretch, channel = part_of(channels, strips * tl.cdiv(rows, written), MAPS)
    begin = image * channels * n
    gate = tl.load(openness + image).to(tl.float32) if GATED else 1.0
    pivot, low, high, low2, high2, _, _ = _sums_in_memory(sums, image, channel, channels, segments, MAPS, False)
    scale, shift = scale_of(norm_mean, norm_variance, norm_weight, norm_bias, epsilon, channel, channels, NORM)
    start, gain, gain_of_mean, moves = coefficients(
        usual, gate, channel, pivot, low, high, low2, high2, scale, shift, channels, n, BANDS, GATED
    )
    top, bottom, column = _segment(stretch, rows, strips, written, PAIRS, LAST)
    _write(
        x + begin, residual + begin, out + begin, channel, top, bottom, column, start, gain, gain_of_mean, moves,
        channels, n, width, rows, PAIRS, LAST, EVEN, BANDS, ADD, RELU,
    )  # fmt: skip


@triton.jit
def _write(
    x, residual, out, channel, top, bottom, column, start, gain, gain_of_mean, moves, channels, n, width, rows,
    PAIRS: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    if BANDS:
        write_rows(
            x, residual, out, channel, top, bottom, column, start, gain, gain_of_mean, moves,
            channels, n, width, rows, PAIRS, LAST, EVEN, ADD, RELU,
        )  # fmt: skip
    else:
        write_plain_rows(
            x, residual, out, channel, top, bottom, column, start, gain, moves,
            channels, n, width, PAIRS, LAST, EVEN, ADD, RELU,
        )  # fmt: skip


@triton.jit
def _tell_sums(
    sums, found, channels, n, width, rows, strips, segments,  # noqa: ARG001
    MAPS: tl.constexpr, PAIRS: tl.constexpr, LAST: tl.constexpr,  # noqa: ARG001
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr,  # noqa: ARG001
):  # fmt: skip
    overlap(EARLY)
    image, _only, channel = part_of(channels, 1, MAPS)
    pivot, low, high, low2, high2, square, rough = _sums_in_memory(sums, image, channel, channels, segments, MAPS, True)
    tell(found, image, channel, pivot, low, high, low2, high2, square, rough, channels, n, BANDS)


@triton.jit
def _sums_in_memory(sums, image, channel, channels, segments, MAPS: tl.constexpr, ALL: tl.constexpr):
    """The pivot, and what `_sum_segments` found in all segments of an image, together."""
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
