"""The rule of evidence on a GPU, in Triton: `channels.realign` and `channels.moments` in two readings and one writing.

A program takes some channels of an image and goes down their maps row by row: local means are sums over three rows, of
which two are known from the row before. Maps of few rows are done whole, all in one kernel; of larger ones a program
does a segment, and the sums go through memory. Nothing of this depends on the batch. It must not: `tl.sum` adds in an
order that depends on the kernel around it, so that two ways to do one map would differ in the last bit.

Sums are those of a map without a *pivot*, the mean of its first row, since the mean is not known before the map was
read, and squares of what is far from zero would cancel in float32. With a first row of the share f of a map's values,
(mean - pivot)² is at most (1 - f) / f variances, so that the variance is found within about 1 / f roundings.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.triton_launch import Launch, aligned_of

ROWS = 16  # of a segment, at most
PER_THREAD = 8  # values in flight
REGISTERS = 128  # a thread: twice as many threads at once, for a few values that are put aside between the passes

# Sums that are kept: of the map, of the low band, of its squares and the high band's; to measure, of the map's squares
# and the high band's absolute values.
_SUMS = 4
_ALL_SUMS = 6


def realign(
    x: Tensor,
    reference: Tensor,
    openness: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """As `kernels.realign`, of float32, bfloat16 or float16 `(batch, channels, ...)`; it keeps the layout.

    It does not depend on the batch to the last bit.
    """
    if _is_last(x) is not None:
        out = torch.empty_like(x)
        realign_maps(x, reference, openness, out)
    else:
        dense = x.contiguous()
        found = torch.empty_like(dense)
        realign_maps(dense, reference, openness, found)
        out = torch.empty_like(x).copy_(found)
    out = out if residual is None else out.add_(residual)
    return out.relu_() if relu else out


def moments(x: Tensor, bands: bool) -> Tensor:
    """As `channels.moments` `(batch, 2 or 5, channels)`: mean, variance; with bands, the variances of both, and the
    mean absolute value of the high one.
    """
    return measure_maps(x if _is_last(x) is not None else x.contiguous(), bands)


def realign_maps(
    x: Tensor, reference: Tensor, openness: Tensor | None, out: Tensor, *, split: bool | None = None
) -> None:
    """As `realign`, into `out`, of the same layout as `x`: contiguous, or with the channels last.

    `split` says whether programs share out a map; None chooses.
    """
    if x.numel() == 0:
        return
    usual, gate = reference.contiguous(), x if openness is None else openness.float().contiguous()
    plan = _plan_of(x, usual, gate, reference.shape[1] == 3, False, split)
    if plan.split:
        sums = x.new_empty(plan.sums, dtype=torch.float32)
        plan.sum_segments(x, sums, *plan.sizes)
        plan.write_segments(x, usual, gate, sums, out, *plan.sizes)
    else:
        plan.whole(x, usual, gate, out, *plan.sizes)


def measure_maps(x: Tensor, bands: bool, *, split: bool | None = None) -> Tensor:
    """As `moments`, of contiguous `x`, or with the channels last. `split` says whether programs share out a map."""
    found = x.new_empty((x.shape[0], 5 if bands else 2, x.shape[1]), dtype=torch.float32)
    if x.numel() == 0:
        return found
    plan = _plan_of(x, x, x, bands, True, split)
    if plan.split:
        sums = x.new_empty(plan.sums, dtype=torch.float32)
        plan.sum_segments(x, sums, *plan.sizes)
        plan.write_segments(x, sums, found, *plan.sizes)
    else:
        plan.whole(x, found, *plan.sizes)
    return found


def _is_last(x: Tensor) -> bool | None:
    """Whether the channels lie last, not second; None where maps have gaps or lie in another order."""
    if x.is_contiguous():
        return False
    return True if x.movedim(1, -1).is_contiguous() else None


class _Plan(NamedTuple):
    """How the work is shared out, and the kernels that do it: one, or two with `sums` numbers in between."""

    split: bool
    sums: int
    sizes: tuple[int, ...]
    whole: Launch
    sum_segments: Launch
    write_segments: Launch


def _plan_of(x: Tensor, usual: Tensor, gate: Tensor, bands: bool, measure: bool, split: bool | None) -> _Plan:
    last = not x.is_contiguous()
    aligned = aligned_of(x, usual, gate)
    return _plan(tuple(x.shape), x.dtype, x.device, last, bands, measure, gate is not x, usual.dtype, aligned, split)


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    _dtype: torch.dtype,
    _device: torch.device,
    last: bool,
    bands: bool,
    measure: bool,
    gated: bool,
    _usual: torch.dtype,
    _aligned: tuple[bool, ...],
    split: bool | None,
) -> _Plan:
    """The plan for all that Triton may specialise a kernel on, so that what it compiles can be kept there."""
    batch, channels, *sides = shape
    n = 1
    for side in sides:
        n *= side
    width = sides[-1] if bands else min(n, 64 if last else 256)  # without bands, rows are what we make them
    rows = -(-n // width)
    across = _power(width)
    most = max(8, min(32, 2048 // across)) if last else max(1, 1024 // across)
    maps = min(_power(channels), most)
    segments = -(-rows // ROWS)
    each = -(-rows // segments)
    tiles = -(-channels // maps)
    if split is None:
        split = segments > 1
    constants = (maps, across, each, last, channels % maps == 0, bands)
    warps = max(1, min(8, maps * across // (32 * PER_THREAD)))
    # Sums that are multiplied and added in one instruction here and in two there would differ in the last bit.
    options = {"num_warps": warps, "maxnreg": REGISTERS, "enable_fp_fusion": False}
    whole, write = (_measure_whole, _measure_segments) if measure else (_realign_whole, _realign_segments)
    rule = () if measure else (gated,)
    return _Plan(
        split,
        batch * segments * (_ALL_SUMS if measure else _SUMS) * channels,
        (channels, n, width, rows, segments),
        Launch(whole, (tiles * batch, 1, 1), (*constants, *rule), **options),
        Launch(_sum_segments, (tiles * segments * batch, 1, 1), (*constants, measure), **options),
        Launch(write, (tiles * (1 if measure else segments) * batch, 1, 1), (*constants, *rule), **options),
    )


def _power(n: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (n - 1).bit_length()


@triton.jit
def _realign_whole(
    x, usual, openness, out, channels, n, width, rows, segments,
    MAPS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
    BANDS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    image, _only, channel = _part(channels, 1, MAPS)
    x += image * channels * n
    gate = tl.load(openness + image).to(tl.float32) if GATED else 1.0
    pivot = _pivot(x, channel, channels, n, width, rows, ACROSS, LAST, EVEN)
    nothing = tl.zeros([MAPS], tl.float32)
    total, low, low2, high2 = nothing, nothing, nothing, nothing
    wanted = tl.where(gate > 0, segments, 0) if GATED else segments
    for segment in range(wanted):
        a, b, c, d, _, _ = _sums(
            x, channel, segment * EACH, pivot, channels, n, width, rows, MAPS, ACROSS, EACH, LAST, EVEN, BANDS, False
        )
        total, low, low2, high2 = total + a, low + b, low2 + c, high2 + d
    start, first, second, moves = _rule(usual, gate, channel, pivot, total, low, low2, high2, channels, n, BANDS, GATED)
    for done in range(segments):  # backwards: what was read last may still be in the cache
        _write(
            x, out + image * channels * n, channel, (segments - 1 - done) * EACH, start, first, second, moves,
            channels, n, width, rows, MAPS, ACROSS, EACH, LAST, EVEN, BANDS,
        )  # fmt: skip


@triton.jit
def _realign_segments(
    x, usual, openness, sums, out, channels, n, width, rows, segments,
    MAPS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
    BANDS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    image, part, channel = _part(channels, segments, MAPS)
    x += image * channels * n
    gate = tl.load(openness + image).to(tl.float32) if GATED else 1.0
    pivot = _pivot(x, channel, channels, n, width, rows, ACROSS, LAST, EVEN)
    nothing = tl.zeros([MAPS], tl.float32)
    total, low, low2, high2 = nothing, nothing, nothing, nothing
    sums += image * segments * 4 * channels + channel
    for segment in tl.range(segments, loop_unroll_factor=4):
        at, inside = sums + segment * 4 * channels, channel < channels
        total += tl.load(at, mask=inside, other=0.0)
        low += tl.load(at + channels, mask=inside, other=0.0)
        low2 += tl.load(at + 2 * channels, mask=inside, other=0.0)
        high2 += tl.load(at + 3 * channels, mask=inside, other=0.0)
    start, first, second, moves = _rule(usual, gate, channel, pivot, total, low, low2, high2, channels, n, BANDS, GATED)
    _write(
        x, out + image * channels * n, channel, part * EACH, start, first, second, moves,
        channels, n, width, rows, MAPS, ACROSS, EACH, LAST, EVEN, BANDS,
    )  # fmt: skip


@triton.jit
def _measure_whole(
    x, found, channels, n, width, rows, segments,
    MAPS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
    BANDS: tl.constexpr,
):  # fmt: skip
    image, _only, channel = _part(channels, 1, MAPS)
    x += image * channels * n
    pivot = _pivot(x, channel, channels, n, width, rows, ACROSS, LAST, EVEN)
    nothing = tl.zeros([MAPS], tl.float32)
    total, low, low2, high2, square, rough = nothing, nothing, nothing, nothing, nothing, nothing
    for segment in range(segments):
        a, b, c, d, e, f = _sums(
            x, channel, segment * EACH, pivot, channels, n, width, rows, MAPS, ACROSS, EACH, LAST, EVEN, BANDS, True
        )
        total, low, low2, high2, square, rough = total + a, low + b, low2 + c, high2 + d, square + e, rough + f
    _tell(found, image, channel, pivot, total, low, low2, high2, square, rough, channels, n, BANDS)


@triton.jit
def _measure_segments(
    x, sums, found, channels, n, width, rows, segments,
    MAPS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,  # noqa: ARG001
    BANDS: tl.constexpr,
):  # fmt: skip
    image, _only, channel = _part(channels, 1, MAPS)
    pivot = _pivot(x + image * channels * n, channel, channels, n, width, rows, ACROSS, LAST, EVEN)
    nothing = tl.zeros([MAPS], tl.float32)
    total, low, low2, high2, square, rough = nothing, nothing, nothing, nothing, nothing, nothing
    sums += image * segments * 6 * channels + channel
    for segment in tl.range(segments, loop_unroll_factor=4):
        at, inside = sums + segment * 6 * channels, channel < channels
        total += tl.load(at, mask=inside, other=0.0)
        low += tl.load(at + channels, mask=inside, other=0.0)
        low2 += tl.load(at + 2 * channels, mask=inside, other=0.0)
        high2 += tl.load(at + 3 * channels, mask=inside, other=0.0)
        square += tl.load(at + 4 * channels, mask=inside, other=0.0)
        rough += tl.load(at + 5 * channels, mask=inside, other=0.0)
    _tell(found, image, channel, pivot, total, low, low2, high2, square, rough, channels, n, BANDS)


@triton.jit
def _sum_segments(
    x, sums, channels, n, width, rows, segments,
    MAPS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
    BANDS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    image, segment, channel = _part(channels, segments, MAPS)
    x += image * channels * n
    pivot = _pivot(x, channel, channels, n, width, rows, ACROSS, LAST, EVEN)
    total, low, low2, high2, square, rough = _sums(
        x, channel, segment * EACH, pivot, channels, n, width, rows, MAPS, ACROSS, EACH, LAST, EVEN, BANDS, ALL
    )
    inside = channel < channels
    sums += (image * segments + segment) * (6 if ALL else 4) * channels + channel
    tl.store(sums, total, mask=inside)
    tl.store(sums + channels, low, mask=inside)
    tl.store(sums + 2 * channels, low2, mask=inside)
    tl.store(sums + 3 * channels, high2, mask=inside)
    if ALL:
        tl.store(sums + 4 * channels, square, mask=inside)
        tl.store(sums + 5 * channels, rough, mask=inside)


@triton.jit
def _part(channels, segments, MAPS: tl.constexpr):
    """Which image, segment and channels a program does: all counted along one axis, the others end at 65,535."""
    tiles = tl.cdiv(channels, MAPS)
    above = tl.program_id(0) // tiles
    image = above // segments
    channel = (tl.program_id(0) - above * tiles) * MAPS + tl.arange(0, MAPS)
    return image.to(tl.int64), above - image * segments, channel


@triton.jit
def _at(channel, y, shift, channels, n, width, rows, ACROSS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr):
    """Where the values of row `y` of some maps are, `shift` to the side, and which there are: (MAPS, ACROSS)."""
    across = tl.arange(0, ACROSS)[None, :] + shift
    pixel = y * width + across
    inside = (across >= 0) & (across < width) & (pixel < n) & (y >= 0) & (y < rows)
    if not EVEN:
        inside = inside & (channel[:, None] < channels)
    return pixel * channels + channel[:, None] if LAST else channel[:, None] * n + pixel, inside


@triton.jit
def _load(x, channel, y, shift, channels, n, width, rows, ACROSS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr):
    """A row of some maps, 0 where there is nothing."""
    at, inside = _at(channel, y, shift, channels, n, width, rows, ACROSS, LAST, EVEN)
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def _three(x, channel, y, row, channels, n, width, rows, ACROSS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr):
    """The sum of each value of a `row` and those beside it."""
    before = _load(x, channel, y, -1, channels, n, width, rows, ACROSS, LAST, EVEN).to(tl.float32)
    after = _load(x, channel, y, 1, channels, n, width, rows, ACROSS, LAST, EVEN).to(tl.float32)
    return before + row.to(tl.float32) + after


@triton.jit
def _share(at, length):
    """What each of two or three neighbours counts, along one side of a map; 0 outside of it."""
    count = 1.0 + tl.where(at > 0, 1.0, 0.0) + tl.where(at < length - 1, 1.0, 0.0)
    return tl.where(at < length, 1.0 / count, 0.0)


@triton.jit
def _pivot(x, channel, channels, n, width, rows, ACROSS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr):
    """The mean of the first row of each map."""
    row = _load(x, channel, 0, 0, channels, n, width, rows, ACROSS, LAST, EVEN)
    return tl.sum(row.to(tl.float32), axis=1) / width


@triton.jit
def _sums(
    x, channel, top, pivot, channels, n, width, rows,
    MAPS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
    BANDS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Over a segment, each map without its pivot: of the values, of the low band, of its squares and the high band's,
    of the values' squares, of the high band's absolute values. Without bands, the third is that of values' squares.
    """
    nothing = tl.zeros([MAPS, ACROSS], tl.float32)
    total, low, low2, high2, square, rough = nothing, nothing, nothing, nothing, nothing, nothing
    bottom = tl.minimum(top + EACH, rows)
    across = tl.arange(0, ACROSS)[None, :]
    if BANDS:
        centre = tl.where(across < width, pivot[:, None], 0.0)
        share = tl.broadcast_to(_share(across, width), [MAPS, ACROSS])
        raw = _load(x, channel, top - 1, 0, channels, n, width, rows, ACROSS, LAST, EVEN)
        above = _three(x, channel, top - 1, raw, channels, n, width, rows, ACROSS, LAST, EVEN)
        raw = _load(x, channel, top, 0, channels, n, width, rows, ACROSS, LAST, EVEN)
        here = _three(x, channel, top, raw, channels, n, width, rows, ACROSS, LAST, EVEN)
        for y in tl.range(top, bottom, loop_unroll_factor=2):
            following = _load(x, channel, y + 1, 0, channels, n, width, rows, ACROSS, LAST, EVEN)
            below = _three(x, channel, y + 1, following, channels, n, width, rows, ACROSS, LAST, EVEN)
            row = raw.to(tl.float32) - centre
            smooth = tl.fma(above + here + below, share * _share(y, rows), -centre)
            sharp = row - smooth
            total += row
            low += smooth
            low2 = tl.fma(smooth, smooth, low2)
            high2 = tl.fma(sharp, sharp, high2)
            if ALL:
                square = tl.fma(row, row, square)
                rough += tl.abs(sharp)
            raw, above, here = following, here, below
    else:
        for y in tl.range(top, bottom, loop_unroll_factor=2):
            at, inside = _at(channel, y, 0, channels, n, width, rows, ACROSS, LAST, EVEN)
            row = tl.where(inside, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - pivot[:, None], 0.0)
            total += row
            low2 = tl.fma(row, row, low2)
    return (
        tl.sum(total, axis=1), tl.sum(low, axis=1), tl.sum(low2, axis=1), tl.sum(high2, axis=1),
        tl.sum(square, axis=1), tl.sum(rough, axis=1),
    )  # fmt: skip


@triton.jit
def _rule(usual, gate, channel, pivot, total, low, low2, high2, channels, n, BANDS: tl.constexpr, GATED: tl.constexpr):
    """`channels.coefficients`, of values and their local means as they are: the start, two gains, and whether to move.

    mean + d + l (low - tilt) + h (high + tilt), with low + mean the local mean, and low + high + mean the value, is
    start + h value + (l - h) local mean.
    """
    k: tl.constexpr = 3 if BANDS else 2
    away = total / n
    mean = pivot + away
    moved = _shift(usual, gate, channel, mean, 0, channels, k)
    if BANDS:
        average = low / n
        tilt = average - away
        soft = tl.exp(_deviation_shift(usual, gate, channel, low2 / n - average * average, 1, channels, k))
        first = tl.exp(_deviation_shift(usual, gate, channel, high2 / n - tilt * tilt, 2, channels, k))
        second = soft - first
        start = mean + moved - soft * mean - second * tilt
    else:
        first = tl.exp(_deviation_shift(usual, gate, channel, low2 / n - away * away, 1, channels, k))
        second = first
        start = mean + moved - first * mean
    if GATED:
        start = tl.where(gate > 0, start, float("nan"))
    moves = (tl.abs(start) < float("inf")) & (first < float("inf")) & (tl.abs(second) < float("inf"))
    return start, first, second, moves


@triton.jit
def _deviation_shift(usual, gate, channel, variance, which, channels, k: tl.constexpr):
    floor = tl.load(usual + (3 * k + which) * channels + channel, mask=channel < channels, other=1.0).to(tl.float32)
    return _shift(usual, gate, channel, 0.5 * tl.log(_not_negative(variance) + floor), which, channels, k)


@triton.jit
def _shift(usual, gate, channel, statistic, which, channels, k: tl.constexpr):
    """How far a statistic is moved: as `channels.shifts`."""
    at, inside = usual + which * channels + channel, channel < channels
    centre = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    spread = tl.load(at + k * channels, mask=inside, other=1.0).to(tl.float32)
    kappa = tl.load(at + 2 * k * channels, mask=inside, other=1.0).to(tl.float32)
    z = (statistic - centre) / spread
    z2 = tl.minimum(z * z, 1e30) * gate
    return z2 / (z2 + kappa) * (centre - statistic)


@triton.jit
def _not_negative(variance):
    return tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _write(
    x, out, channel, top, start, first, second, moves, channels, n, width, rows,
    MAPS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
    BANDS: tl.constexpr,
):  # fmt: skip
    """A segment of each map: start + gain * value + gain * local mean, or as it is where it is not moved."""
    starts = tl.broadcast_to(start[:, None], [MAPS, ACROSS])
    firsts = tl.broadcast_to(first[:, None], [MAPS, ACROSS])
    raw = _load(x, channel, top, 0, channels, n, width, rows, ACROSS, LAST, EVEN)
    if BANDS:
        share = second[:, None] * _share(tl.arange(0, ACROSS)[None, :], width)
        before = _load(x, channel, top - 1, 0, channels, n, width, rows, ACROSS, LAST, EVEN)
        above = _three(x, channel, top - 1, before, channels, n, width, rows, ACROSS, LAST, EVEN)
        here = _three(x, channel, top, raw, channels, n, width, rows, ACROSS, LAST, EVEN)
    for y in tl.range(top, tl.minimum(top + EACH, rows), loop_unroll_factor=2):
        following = _load(x, channel, y + 1, 0, channels, n, width, rows, ACROSS, LAST, EVEN)
        value = tl.fma(raw.to(tl.float32), firsts, starts)
        if BANDS:
            below = _three(x, channel, y + 1, following, channels, n, width, rows, ACROSS, LAST, EVEN)
            value = tl.fma(above + here + below, share * _share(y, rows), value)
            above, here = here, below
        if out.dtype.element_ty == tl.float16:  # a reference may lie beyond what float16 holds
            value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        at, inside = _at(channel, y, 0, channels, n, width, rows, ACROSS, LAST, EVEN)
        tl.store(out + at, tl.where(moves[:, None], value.to(out.dtype.element_ty), raw), mask=inside)
        raw = following


@triton.jit
def _tell(found, image, channel, pivot, total, low, low2, high2, square, rough, channels, n, BANDS: tl.constexpr):
    inside = channel < channels
    found += image * (5 if BANDS else 2) * channels + channel
    away = total / n
    tl.store(found, pivot + away, mask=inside)
    if BANDS:
        average = low / n
        tilt = average - away
        tl.store(found + channels, _not_negative(square / n - away * away), mask=inside)
        tl.store(found + 2 * channels, _not_negative(low2 / n - average * average), mask=inside)
        tl.store(found + 3 * channels, _not_negative(high2 / n - tilt * tilt), mask=inside)
        tl.store(found + 4 * channels, rough / n, mask=inside)
    else:
        tl.store(found + channels, _not_negative(low2 / n - away * away), mask=inside)
