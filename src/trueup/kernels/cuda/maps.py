"""The rule of evidence in Triton: `evidence.realign` reads maps twice, `evidence.moments` once.

Maps are divided into vertical strips, and strips into segments of some rows. A small map is a single segment, and one
kernel does it all. For larger maps there are two kernels: programs sum over segments, then programs write rows. What is
added up, and in what order, does not depend on the batch. The number of programs does: few images need many programs,
each with fewer rows and channels, many images need programs that read no row twice. The device functions are in
`strips`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueup.kernels.cuda.again import AgainRealign
from trueup.kernels.cuda.compile_ahead import KernelSpec, skip_uncompiled, specs_of
from trueup.kernels.cuda.launch import Launch, aligned, processors, ready, starts_early
from trueup.kernels.cuda.map_kernels import (
    measure_whole,
    moments_from_sums,
    realign_whole,
    sum_segments,
    write_rows,
)
from trueup.kernels.fused_norms import BatchNorm
from trueup.kernels.layout import channels_lie_last
from trueup.kernels.recent import Recent, recent_of

SEGMENT_ROWS = 28  # rows per segment, at most; even, because two are processed at a time
ROWS_WRITTEN = 8  # rows that a program writes, roughly, if there are few programs
PROGRAMS_PER_PROCESSOR = 12  # enough to hide memory latency
WHOLE_ROWS = 56  # rows, at most, of a map of one strip that is not divided into segments
CACHE_LINE = 128  # bytes per program, if channels lie last
MAX_HALVINGS = 2  # of the channels per program, and of the work per thread, if there are few programs
STRIP_COLUMNS = {True: 16, False: 64}  # columns per strip, at most: if channels lie last, and otherwise
PLAIN_COLUMNS = 64  # columns per strip without bands, where any width will do

_SUMS = 5  # stored per segment: the pivot, and the first four sums of `sums_with_bands`
_ALL_SUMS = 7  # for `moments`: the pivot, and all six sums


def realign(
    x: Tensor,
    reference: Tensor,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
    ceiling: float | None = None,
    norm: BatchNorm | None = None,
    channels: int = 1,
) -> Tensor | None:
    """As `plain.realign`, for float32, bfloat16 or float16 maps; the result has the layout of `x`.

    Return None if this pass skips the rule, because its kernels are not compiled yet (`compile_ahead`).

    `channels` is the dimension of `x` that holds the channels. A `norm` is applied to `x` first. The result is rounded
    once: unless there is a norm, values that are not moved come out as from torch's separate operators. This call is
    remembered if the next one of its kind can do without copies.
    """
    if channels < 0:
        channels += x.dim()
    if channels != 1 and not (channels == x.dim() - 1 and x.is_contiguous()):
        beside = None if residual is None else residual.movedim(channels, 1)
        moved = realign(x.movedim(channels, 1), reference, gate, beside, relu, ceiling, norm)
        return None if moved is None else moved.movedim(1, channels)
    dense = aligned(x) if channels != 1 else _in_order(x)
    out = torch.empty_like(dense)
    recent = recent_of(reference) if dense is x else None
    if residual is not None and residual.stride() != dense.stride():
        residual, recent = torch.empty_like(dense).copy_(residual), None
    if not realign_maps(dense, reference, gate, out, residual, relu, ceiling, norm, channels, recent=recent):
        return None
    return out if dense is x or dense.stride() == x.stride() else torch.empty_like(x).copy_(out)


def moments(x: Tensor, bands: bool) -> Tensor | None:
    """As `plain.moments`, for float32, bfloat16 or float16 `(batch, channels, ...)`; None if this pass is skipped."""
    return measure_maps(_in_order(x), bands)


def realign_maps(
    x: Tensor,
    reference: Tensor,
    gate: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    relu: bool = False,
    ceiling: float | None = None,
    norm: BatchNorm | None = None,
    channels: int = 1,
    *,
    recent: Recent | None = None,
    split: bool | None = None,
    programs_per_strip: int | None = None,
    halvings: int | None = None,
) -> bool:
    """As `realign`, into `out`. Return False if this pass skips the rule.

    All tensors have the layout of `x`: contiguous, or with the channels last.

    `split` says whether several programs share a map, `programs_per_strip` how many share a strip at most, and
    `halvings` how often the channels of a program are halved; None chooses.
    """
    if x.numel() == 0:
        return True
    # Few calls into torch: on the host, they take longer than the kernels of a small layer on a GPU.
    device, dtype = x.device, x.dtype
    gated, gates = gate_or_one(gate, device)
    if norm is None:
        normed, mean, variance, weight, bias, epsilon = 0, x, x, x, x, 0.0
    else:
        mean, variance, weight, bias, epsilon = norm
        normed = 1
        even = mean.is_contiguous() and variance.is_contiguous() and weight.is_contiguous() and bias.is_contiguous()
        if not even or (mean.data_ptr() | variance.data_ptr() | weight.data_ptr() | bias.data_ptr()) & 15:
            mean, variance, weight, bias = ready(mean), ready(variance), ready(weight), ready(bias)
            recent = None
    if (known := ready(reference)) is not reference:
        reference, recent = known, None
    norm_dtypes = (dtype,) * 4 if norm is None else (mean.dtype, variance.dtype, weight.dtype, bias.dtype)
    dtypes = (reference.dtype, *norm_dtypes)
    bands, add = reference.shape[1] == 3, residual is not None
    shape, strides = x.shape, x.stride()
    plan = _plan(shape, strides, channels, dtype, device, bands, add, dtypes, split, programs_per_strip, halvings)
    if plan.missing and skip_uncompiled(plan.missing):
        return False
    numbers = (epsilon, gated, normed, 0.0 if relu else -math.inf, math.inf if ceiling is None else ceiling)
    tensors = (reference, gates, aligned(residual) if residual is not None else x, out, mean, variance, weight, bias)
    if plan.split:
        sums = torch.empty(plan.sums, dtype=torch.float32, device=device)
        plan.sum_segments((x, sums), *plan.sum_sizes)
        plan.finish((x, sums, *tensors), *numbers, *plan.write_sizes)
        launches = [(plan.sum_segments, plan.sum_sizes), (plan.finish, (*numbers, *plan.write_sizes))]
    else:
        plan.whole((x, *tensors), *numbers, *plan.whole_sizes)
        launches = [(plan.whole, (*numbers, *plan.whole_sizes))]
    lasting = gate is not None or device in _ONES  # what stands for a gate may be of a CUDA graph that is captured now
    if recent is not None and lasting and all(launch.run is not None for launch, _ in launches):
        call = (x, reference, gate, residual, relu, ceiling, norm, channels)
        again = AgainRealign(*call, launches=launches, gates=gates, sums=plan.sums if plan.split else 0)
        recent.remember(shape, again)
    return True


def measure_maps(
    x: Tensor,
    bands: bool,
    *,
    split: bool | None = None,
    programs_per_strip: int | None = None,
    halvings: int | None = None,
) -> Tensor | None:
    """As `moments`, for `x` that is contiguous or has its channels last; options as for `realign_maps`."""
    found = x.new_empty((x.shape[0], 5 if bands else 2, x.shape[1]), dtype=torch.float32)
    if x.numel() == 0:
        return found
    division = (split, programs_per_strip, halvings)
    plan = _plan(x.shape, x.stride(), 1, x.dtype, x.device, bands, None, (), *division)
    if plan.missing and skip_uncompiled(plan.missing):
        return None
    if plan.split:
        sums = x.new_empty(plan.sums, dtype=torch.float32)
        plan.sum_segments((x, sums), *plan.sum_sizes)
        plan.finish((sums, found), *plan.moment_sizes)
    else:
        plan.whole((x, found), *plan.whole_sizes)
    return found


def gate_or_one(gate: Tensor | None, device: torch.device) -> tuple[int, Tensor]:
    """Stride of the gate values, and the values `(batch,)`. Without a gate, stride 0 and a single value of 1."""
    if gate is not None:
        return 1, ready(gate.float())
    if (found := _ONES.get(device)) is None:
        with torch.inference_mode(False):
            found = torch.ones(1, dtype=torch.float32, device=device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # not the memory of a CUDA graph
            _ONES[device] = found
    return 0, found


_ONES: dict[torch.device, Tensor] = {}


def _in_order(x: Tensor) -> Tensor:
    """Return `x` if it is contiguous or has its channels last, otherwise a copy with the layout that one image has."""
    if x.is_contiguous() or channels_lie_last(x):
        return aligned(x)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_lie_last(x[:1]) else x.contiguous()


class _Plan(NamedTuple):
    """Division of the work among programs, and the kernels that do it: `whole`, or `sum_segments` and `finish`."""

    split: bool
    sums: int  # numbers that `sum_segments` stores
    # Arguments of the kernels: units of channels, pixels, width, rows and strips, and how strips are divided.
    whole_sizes: tuple[int, ...]
    sum_sizes: tuple[int, ...]
    write_sizes: tuple[int, ...]
    moment_sizes: tuple[int, ...]
    whole: Launch
    sum_segments: Launch
    finish: Launch
    missing: list[KernelSpec]  # kernels that may not be compiled yet


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    channel_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    bands: bool,
    add: bool | None,
    dtypes: tuple[torch.dtype, ...],
    split: bool | None,
    programs_per_strip: int | None,
    halvings: int | None,
) -> _Plan:
    """Return the plan for everything that Triton may specialise a kernel on; it keeps the compiled kernels.

    `add` says whether there is a residual; None if maps are only measured.
    """
    batch, channels = shape[0], shape[channel_dim]
    sides = [side for dim, side in enumerate(shape) if dim not in (0, channel_dim)]
    last = channel_dim != 1 or not _is_contiguous(shape, strides)  # whether channels lie last in memory, not second
    n = 1
    for side in sides:
        n *= side
    columns = STRIP_COLUMNS[last] if bands else PLAIN_COLUMNS
    width = sides[-1] if bands else columns
    rows = -(-n // width)
    pairs = columns // 2 if last or not bands else _power_of_two(min(-(-width // 2), columns // 2))
    strips = -(-width // (2 * pairs))
    longer = 1 if bands else PLAIN_COLUMNS // STRIP_COLUMNS[True]  # rows are, without bands
    divided = rows > 2 and (strips > 1 or rows > WHOLE_ROWS // longer)
    parts = max(2, -(-rows // max(2, SEGMENT_ROWS // longer))) if divided else 1  # segments per strip
    rows_per_segment = 2 * -(-rows // (2 * parts))
    segments = strips * parts
    if split is None:
        split = segments > 1
    pairs_per_thread = 16 // dtype.itemsize if last else max(1, pairs // 8)
    maps = CACHE_LINE // dtype.itemsize if last else 64 * pairs_per_thread // pairs
    if halvings is None:
        # If channels lie last, half of them are half a cache line; otherwise they are as fast to read.
        programs, few = -(-channels // maps) * segments * batch, ((1 if split else 2) if last else 8)
        halvings = sum(programs << times <= few * processors(device) for times in range(1, MAX_HALVINGS + 1))
    # A thread keeps two pairs, or one.
    halvings = min(halvings, MAX_HALVINGS, pairs_per_thread.bit_length() - (2 if last else 1))
    pairs_per_thread, maps = pairs_per_thread >> halvings, min(_power_of_two(channels), maps >> halvings)
    tiles = -(-channels // maps)
    if programs_per_strip is None:
        programs_per_strip = -(-PROGRAMS_PER_PROCESSOR * processors(device) // (tiles * strips * batch))
    segments_per_program = -(-parts // programs_per_strip)
    rows_written = 2 * -(-rows // (2 * min(programs_per_strip, -(-rows // ROWS_WRITTEN))))
    # Channels are passed as a multiple of the unit that a thread loads at once, so that Triton knows their alignment.
    unit = math.gcd(channels, 16 // dtype.itemsize) if last else 1
    constants = (maps, pairs, unit, last, bands)
    warps = max(1, min(8, maps * pairs // (32 * pairs_per_thread)))
    # No fusion of multiplications and additions: the kernels would differ in the last bit.
    options = {"num_warps": warps, "enable_fp_fusion": False}

    def launch(kernel: Any, programs: int, *more: bool) -> Launch:
        early = starts_early(device, programs)
        pdl = {"launch_pdl": True} if early else {}
        return Launch(kernel, (programs, 1, 1), (*constants, early, *more), **options, **pdl)

    sizes = (channels // unit, n, width, rows, strips)
    measure, flags, all_strips = add is None, (() if add is None else (add,)), tiles * strips * batch
    whole = launch(measure_whole if measure else realign_whole, tiles * batch, *flags)
    sums = launch(sum_segments, all_strips * -(-parts // segments_per_program), measure)
    finish = (
        launch(moments_from_sums, tiles * batch)
        if measure
        else launch(write_rows, all_strips * -(-rows // rows_written), *flags)
    )
    return _Plan(
        split,
        batch * segments * (_ALL_SUMS if measure else _SUMS) * channels,
        (*sizes, rows_per_segment, segments),
        (*sizes, rows_per_segment, segments, segments_per_program),
        (*sizes, rows_written, segments),
        (*sizes, segments),
        whole,
        sums,
        finish,
        specs_of(_arguments_of(whole, sums, finish, split, dtype, dtypes), device),
    )


def _arguments_of(
    whole: Launch, sums: Launch, finish: Launch, split: bool, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> dict[Launch, tuple[Any, ...]]:
    """Arguments of a plan's kernels, as `specs_of` takes them. `dtypes` are the reference's and a norm's, if any."""
    wide, size = torch.float32, 2  # any size will do, as kernels are not specialised on them
    tensors: tuple[Any, ...] = (wide,)
    if dtypes:
        reference, *norm = dtypes
        tensors = (reference, wide, dtype, dtype, *norm, 1e-5, 0, 0, 0.0, 0.0)
    if not split:
        return {whole: (dtype, *tensors, *(size,) * 7)}
    last = (dtype, wide, *tensors, *(size,) * 7) if dtypes else (wide, wide, *(size,) * 6)
    return {sums: (dtype, wide, *(size,) * 8), finish: last}


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor is contiguous, as torch defines it: strides of dimensions of length 1 do not count."""
    expected = 1
    for side, stride in zip(reversed(shape), reversed(strides), strict=True):
        if side != 1 and stride != expected:
            return False
        expected *= side
    return True


def _power_of_two(n: int) -> int:
    """Smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()
