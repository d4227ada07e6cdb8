"""The rule of evidence on a GPU, in Triton: `channels.realign` and `channels.moments` in two readings and one writing.

Maps that are one segment, a strip of few rows, are done whole, in one kernel; of larger ones a program does a segment,
and the sums go through memory. Nothing of this depends on the batch. It must not: `tl.sum` adds in an order that
depends on the kernel around it, so that two ways to do one map would differ in the last bit. What the
kernels are made of is in `triton_strips`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.norm import Norm
from trueup.kernels.triton_launch import Launch, aligned, overlap, overlaps
from trueup.kernels.triton_norm import scale_of
from trueup.kernels.triton_strips import coefficients, part_of, pivot_of, sums_of, tell, write_segment

ROWS = 20  # of a segment, at most; even, as they are taken two at a time
WHOLE = 56  # rows of a map that is one segment, at most, if it is one strip
LINE = 128  # bytes that memory gives at once: the channels of a program, where they lie last
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
) -> None:
    """As `realign`, into `out`; all are of the same layout as `x`: contiguous, or with the channels last.

    `split` says whether programs share out a map; None chooses.
    """
    if x.numel() == 0:
        return
    gate = x if openness is None else aligned(openness.float().contiguous())
    before = (x, x, x, x) if norm is None else tuple(aligned(tensor.contiguous()) for tensor in norm.tensors)
    epsilon = 0.0 if norm is None else norm.epsilon
    tensors = (aligned(reference.contiguous()), gate, x if residual is None else aligned(residual), out)
    ends = (openness is not None, residual is not None, relu, norm is not None)
    dtypes = (reference.dtype, *(tensor.dtype for tensor in before))
    plan = _plan(_shape(x), x.dtype, x.device, reference.shape[1] == 3, ends, dtypes, split)
    if plan.split:
        sums = x.new_empty(plan.sums, dtype=torch.float32)
        plan.sum_segments(x, sums, *plan.sizes)
        plan.write_segments(x, sums, *tensors, *before, epsilon, *plan.sizes)
    else:
        plan.whole(x, *tensors, *before, epsilon, *plan.sizes)


def measure_maps(x: Tensor, bands: bool, *, split: bool | None = None) -> Tensor:
    """As `moments`, of contiguous `x`, or with the channels last. `split` says whether programs share out a map."""
    found = x.new_empty((x.shape[0], 5 if bands else 2, x.shape[1]), dtype=torch.float32)
    if x.numel() == 0:
        return found
    plan = _plan(_shape(x), x.dtype, x.device, bands, None, (), split)
    if plan.split:
        sums = x.new_empty(plan.sums, dtype=torch.float32)
        plan.sum_segments(x, sums, *plan.sizes)
        plan.write_segments(sums, found, *plan.sizes)
    else:
        plan.whole(x, found, *plan.sizes)
    return found


def _in_order(x: Tensor) -> Tensor:
    """As it is, if maps are contiguous or have their channels last, and else a copy."""
    if not (x.is_contiguous() or x.movedim(1, -1).is_contiguous()):
        return x.contiguous()
    return aligned(x)


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
    whole: Launch
    sum_segments: Launch
    write_segments: Launch


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: _Shape,
    dtype: torch.dtype,
    device: torch.device,
    bands: bool,
    ends: tuple[bool, bool, bool, bool] | None,
    _dtypes: tuple[torch.dtype, ...],
    split: bool | None,
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
    each = 16 // dtype.itemsize if last else max(1, pairs // 8)  # pairs of a thread
    maps = min(_power(channels), LINE // dtype.itemsize if last else 64 * each // pairs)
    longer = 1 if bands else 4  # a row is less work without them
    parts = 1 if strips == 1 and rows <= longer * WHOLE else -(-rows // (longer * ROWS))
    segments = strips * parts
    tiles = -(-channels // maps)
    if split is None:
        split = segments > 1
    early = overlaps(device, tiles * segments * batch)
    constants = (maps, pairs, 2 * -(-rows // (2 * parts)), last, channels % maps == 0, bands, early)
    warps = max(1, min(8, maps * pairs // (32 * each)))
    # As few registers as do without putting much aside: the more programs at once, the better they hide each other's
    # waiting for memory.
    registers = 88 + 10 * each if last else 64 + 8 * each + (0 if split else 32)
    # Sums that are multiplied and added in one instruction here and in two there would differ in the last bit.
    options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}
    if early:
        options["launch_pdl"] = True
    measure, rule = ends is None, ends or ()
    whole, write = (_measure_whole, _measure_segments) if measure else (_realign_whole, _realign_segments)
    return _Plan(
        split,
        batch * segments * (_ALL_SUMS if measure else _SUMS) * channels,
        (channels, n, width, rows, segments, strips),
        Launch(whole, (tiles * batch, 1, 1), (*constants, *rule), **options),
        Launch(_sum_segments, (tiles * segments * batch, 1, 1), (*constants, measure), **options),
        Launch(write, (tiles * (1 if measure else segments) * batch, 1, 1), (*constants, *rule), **options),
    )


def _power(n: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (n - 1).bit_length()


@triton.jit
def _realign_whole(
    x, usual, openness, residual, out, norm_mean, norm_variance, norm_weight, norm_bias, epsilon,
    channels, n, width, rows, segments, strips,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    RELU: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    image, _only, channel = part_of(channels, 1, MAPS)
    begin = image * channels * n
    x += begin
    gate = tl.load(openness + image).to(tl.float32) if GATED else 1.0
    pivot = pivot_of(x, channel, channels, n, width, LAST, EVEN)
    nothing = tl.zeros([MAPS], tl.float32)
    low, high, low2, high2 = nothing, nothing, nothing, nothing
    wanted = tl.where(gate > 0, segments, 0) if GATED else segments
    for segment in range(wanted):
        a, b, c, d, _, _ = sums_of(
            x, channel, segment, pivot, channels, n, width, rows, strips,
            MAPS, PAIRS, EACH, LAST, EVEN, BANDS, False,
        )  # fmt: skip
        low, high, low2, high2 = low + a, high + b, low2 + c, high2 + d
    scale, shift = scale_of(norm_mean, norm_variance, norm_weight, norm_bias, epsilon, channel, channels, NORM)
    start, gain, gain_of_mean, moves = coefficients(
        usual, gate, channel, pivot, low, high, low2, high2, scale, shift, channels, n, BANDS, GATED
    )
    for done in range(segments):  # backwards: what was read last may still be in the cache
        write_segment(
            x, residual + begin, out + begin, channel, segments - 1 - done, start, gain, gain_of_mean, moves,
            channels, n, width, rows, strips, PAIRS, EACH, LAST, EVEN, BANDS, ADD, RELU,
        )  # fmt: skip


@triton.jit
def _realign_segments(
    x, sums, usual, openness, residual, out, norm_mean, norm_variance, norm_weight, norm_bias, epsilon,
    channels, n, width, rows, segments, strips,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    RELU: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    image, segment, channel = part_of(channels, segments, MAPS)
    begin = image * channels * n
    gate = tl.load(openness + image).to(tl.float32) if GATED else 1.0
    nothing = tl.zeros([MAPS], tl.float32)
    low, high, low2, high2 = nothing, nothing, nothing, nothing
    inside = channel < channels
    sums += image * segments * 5 * channels + channel
    pivot = tl.load(sums, mask=inside, other=0.0)
    for other in tl.range(segments, loop_unroll_factor=4):
        at = sums + other * 5 * channels
        low += tl.load(at + channels, mask=inside, other=0.0)
        high += tl.load(at + 2 * channels, mask=inside, other=0.0)
        low2 += tl.load(at + 3 * channels, mask=inside, other=0.0)
        high2 += tl.load(at + 4 * channels, mask=inside, other=0.0)
    scale, shift = scale_of(norm_mean, norm_variance, norm_weight, norm_bias, epsilon, channel, channels, NORM)
    start, gain, gain_of_mean, moves = coefficients(
        usual, gate, channel, pivot, low, high, low2, high2, scale, shift, channels, n, BANDS, GATED
    )
    write_segment(
        x + begin, residual + begin, out + begin, channel, segment, start, gain, gain_of_mean, moves,
        channels, n, width, rows, strips, PAIRS, EACH, LAST, EVEN, BANDS, ADD, RELU,
    )  # fmt: skip


@triton.jit
def _measure_whole(
    x, found, channels, n, width, rows, segments, strips,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    image, _only, channel = part_of(channels, 1, MAPS)
    x += image * channels * n
    pivot = pivot_of(x, channel, channels, n, width, LAST, EVEN)
    nothing = tl.zeros([MAPS], tl.float32)
    low, high, low2, high2, square, rough = nothing, nothing, nothing, nothing, nothing, nothing
    for segment in range(segments):
        a, b, c, d, e, f = sums_of(
            x, channel, segment, pivot, channels, n, width, rows, strips,
            MAPS, PAIRS, EACH, LAST, EVEN, BANDS, True,
        )  # fmt: skip
        low, high, low2, high2, square, rough = low + a, high + b, low2 + c, high2 + d, square + e, rough + f
    tell(found, image, channel, pivot, low, high, low2, high2, square, rough, channels, n, BANDS)


@triton.jit
def _measure_segments(
    sums, found, channels, n, width, rows, segments, strips,  # noqa: ARG001
    MAPS: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr,  # noqa: ARG001
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr,  # noqa: ARG001
):  # fmt: skip
    overlap(EARLY)
    image, _only, channel = part_of(channels, 1, MAPS)
    nothing = tl.zeros([MAPS], tl.float32)
    low, high, low2, high2, square, rough = nothing, nothing, nothing, nothing, nothing, nothing
    inside = channel < channels
    sums += image * segments * 7 * channels + channel
    pivot = tl.load(sums, mask=inside, other=0.0)
    for segment in tl.range(segments, loop_unroll_factor=4):
        at = sums + segment * 7 * channels
        low += tl.load(at + channels, mask=inside, other=0.0)
        high += tl.load(at + 2 * channels, mask=inside, other=0.0)
        low2 += tl.load(at + 3 * channels, mask=inside, other=0.0)
        high2 += tl.load(at + 4 * channels, mask=inside, other=0.0)
        square += tl.load(at + 5 * channels, mask=inside, other=0.0)
        rough += tl.load(at + 6 * channels, mask=inside, other=0.0)
    tell(found, image, channel, pivot, low, high, low2, high2, square, rough, channels, n, BANDS)


@triton.jit
def _sum_segments(
    x, sums, channels, n, width, rows, segments, strips,
    MAPS: tl.constexpr, PAIRS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BANDS: tl.constexpr, EARLY: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    overlap(EARLY)
    image, segment, channel = part_of(channels, segments, MAPS)
    x += image * channels * n
    pivot = pivot_of(x, channel, channels, n, width, LAST, EVEN)
    low, high, low2, high2, square, rough = sums_of(
        x, channel, segment, pivot, channels, n, width, rows, strips,
        MAPS, PAIRS, EACH, LAST, EVEN, BANDS, ALL,
    )  # fmt: skip
    inside = channel < channels
    sums += (image * segments + segment) * (7 if ALL else 5) * channels + channel
    tl.store(sums, pivot, mask=inside)
    tl.store(sums + channels, low, mask=inside)
    tl.store(sums + 2 * channels, high, mask=inside)
    tl.store(sums + 3 * channels, low2, mask=inside)
    tl.store(sums + 4 * channels, high2, mask=inside)
    if ALL:
        tl.store(sums + 5 * channels, square, mask=inside)
        tl.store(sums + 6 * channels, rough, mask=inside)
