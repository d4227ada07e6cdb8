"""The rule of evidence on the CPU, compiled by numba: one pass over each map to measure it, one to write it.

A map fits into the fastest cache, whereas torch's own operators write each step of each map to memory and read it back.
The rule itself, between the two passes, is `evidence.coefficients`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import njit
from torch import Tensor

from trueup.functional import evidence
from trueup.kernels.cpu.threads import run_parallel
from trueup.kernels.plain.maps import add_and_relu

_PART = 1 << 16  # values that justify another thread
_RUN = 1024  # values summed in float32; the sums of runs are added in float64


def realign(x: Tensor, reference: Tensor, gate: Tensor | None, residual: Tensor | None, relu: bool) -> Tensor:
    """As `plain.realign`, for float32, bfloat16 or float16 `(batch, channels, ...)`; the layout of `x` is kept."""
    if x.numel() == 0:
        return x.clone()
    bands = reference.shape[1] == 3
    maps, out = _as_maps(x, bands), torch.empty(x.shape)
    if x.dtype == torch.float32:
        beside = None if residual is None else _as_maps(residual, bands)
        _realign_maps(maps, reference, gate, out.view(maps.shape), beside, relu)
        return out if out.stride() == x.stride() else torch.empty_like(x).copy_(out)
    _realign_maps(maps, reference, gate, out.view(maps.shape))
    if x.dtype == torch.float16:
        limit = torch.finfo(x.dtype).max
        out = torch.where(x.isfinite(), out.clamp(-limit, limit), out)
    # Each step is rounded to the narrow dtype.
    return torch.empty_like(x).copy_(add_and_relu(out.to(x.dtype), residual, relu))


def moments(x: Tensor, bands: bool) -> Tensor:
    """As `plain.moments`, for float32, bfloat16 or float16 `(batch, channels, ...)`."""
    if x.numel() == 0:
        return evidence.moments(x, bands=bands)
    return _measure_maps(_as_maps(x, bands), bands=bands)[:, : 5 if bands else 2].contiguous()


def _as_maps(x: Tensor, bands: bool) -> Tensor:
    """Contiguous float32 maps `(batch, channels, height, width)`; without bands, each map is one row."""
    shape = x.shape if bands else (*x.shape[:2], 1, x[0, 0].numel())
    return x.float().contiguous().view(shape)


def _realign_maps(
    maps: Tensor,
    reference: Tensor,
    gate: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    relu: bool = False,
) -> None:
    """Write relu(realigned maps + residual) into `out`; all are contiguous float32 `(batch, channels, height, width)`.

    Images whose gate value is 0 are not even measured.
    """
    bands = reference.shape[1] == 3
    moves = None if gate is None else gate > 0
    found = _measure_maps(maps, bands=bands, only=moves)
    moments, tilt = found[:, [0, 2, 3] if bands else [0, 1]], found[:, 5]
    terms = torch.cat([found[:, :1], evidence.coefficients(moments, tilt, reference, gate)], dim=1)
    if moves is not None:
        terms = torch.where(moves[:, None, None], terms, torch.nan)  # `_write` leaves such maps as they are
    planes, into = _planes(maps), _planes(out)
    terms_of_planes = terms.transpose(1, 2).reshape(len(planes), -1).contiguous().numpy()
    beside = None if residual is None else _planes(residual)
    least = np.float32(0 if relu else -np.inf)  # as in torch's relu, NaN and -0 are not less than 0
    _for_planes(
        lambda begin, end: _write(planes, begin, end, maps.shape[3], terms_of_planes, beside, least, into), planes
    )


def _measure_maps(maps: Tensor, *, bands: bool, only: Tensor | None = None) -> Tensor:
    """Five `evidence.moments` and the low band's residual mean `(batch, 6, channels)` of contiguous float32 maps.

    Without `bands`, the last four are 0. Images that are False in `only` `(batch,)` get zeros.
    """
    planes, found = _planes(maps), np.zeros((maps.shape[0] * maps.shape[1], 6), np.float32)
    wanted = np.ones(len(planes), np.bool_) if only is None else only.repeat_interleave(maps.shape[1]).numpy()
    _for_planes(lambda begin, end: _measure(planes, begin, end, maps.shape[3] if bands else 0, wanted, found), planes)
    return torch.from_numpy(found).view(*maps.shape[:2], 6).transpose(1, 2)


def _planes(maps: Tensor) -> np.ndarray:
    """View maps as rows, one per map."""
    planes: np.ndarray = maps.detach().view(-1, maps.shape[2] * maps.shape[3]).numpy()
    return planes


def _for_planes(work: Callable[[int, int], None], planes: np.ndarray) -> None:
    """Call `work(begin, end)` in parallel, for ranges that cover all planes."""
    shares = min(torch.get_num_threads(), len(planes), max(1, planes.size // _PART))
    bounds = np.linspace(0, len(planes), shares + 1).astype(np.int64)
    run_parallel(lambda k: work(bounds[k], bounds[k + 1]), shares)


@njit(nogil=True, cache=True)
def _measure(planes, begin, end, width, wanted, found):
    """Measure those of maps `begin` to `end - 1` that are `wanted`; there are bands if `width` is not 0."""
    n = planes.shape[1]
    centred, beside = np.empty(n, np.float32), np.empty(n, np.float32)
    for p in range(begin, end):
        if not wanted[p]:
            continue
        mean = np.float32(_sum(planes[p]) / n)
        _centre(planes[p], mean, centred)
        found[p, 0], found[p, 1] = mean, _sum_of_squares(centred) / n
        if width:
            _smooth_rows(centred, width, beside)
            tilt = low = high = size = 0.0
            for first, last, up, down in _blocks(n, width):
                t, s, h, a = _measure_block(centred, beside, first, last, up, down)
                tilt, low, high, size = tilt + t, low + s, high + h, size + a
            tilt = tilt / n
            found[p, 2], found[p, 3] = max(low / n - tilt * tilt, 0.0), max(high / n - tilt * tilt, 0.0)
            found[p, 4], found[p, 5] = size / n, tilt


# The compiler may choose the order of these sums, so that it can use vectors. The order is the same every time only if
# the loop writes nothing: otherwise the code would check whether arrays overlap in memory, with an order for each case.
# Loops run over slices from 0, because an index that might be negative prevents vectorisation.
@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _sum(plane):
    total = 0.0
    for begin in range(0, len(plane), _RUN):
        run, part = plane[begin : begin + _RUN], np.float32(0.0)
        for k in range(len(run)):
            part += run[k]
        total += float(part)
    return total


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _sum_of_squares(plane):
    total = 0.0
    for begin in range(0, len(plane), _RUN):
        run, part = plane[begin : begin + _RUN], np.float32(0.0)
        for k in range(len(run)):
            part += run[k] * run[k]
        total += float(part)
    return total


@njit(nogil=True, cache=True)
def _centre(plane, mean, centred):
    """Write the map minus its mean into `centred`."""
    for k in range(len(plane)):
        centred[k] = plane[k] - mean


@njit(nogil=True, cache=True)
def _smooth_rows(plane, width, beside):
    """Write the mean of each value and its neighbours in the row into `beside`; at an end there is one neighbour."""
    third, half = np.float32(1 / 3), np.float32(0.5)
    before, here, after, into = plane[:-2], plane[1:-1], plane[2:], beside[1:-1]
    for k in range(len(into)):  # one long loop that ignores the ends of rows; they follow
        into[k] = (before[k] + here[k] + after[k]) * third
    for first in range(0, len(plane), width):
        last = first + width - 1
        beside[first] = (plane[first] + plane[min(first + 1, last)]) * half
        beside[last] = (plane[max(last - 1, first)] + plane[last]) * half


@njit(nogil=True, cache=True)
def _blocks(n, width):
    """First row, middle rows and last row: begin, end, and the offsets of the rows above and below (0 if none)."""
    if n == width:
        return (0, n, 0, 0), (n, n, 0, 0), (n, n, 0, 0)
    return (0, width, 0, width), (width, n - width, -width, width), (n - width, n, -width, 0)


@njit(inline="always")
def _scales(up, down):
    """Weights of a row and of those above and below it in a local mean; 0 for a row outside the map."""
    scale = np.float32(1 / (1 + (up != 0) + (down != 0)))
    return scale, scale * np.float32(up != 0), scale * np.float32(down != 0)


@njit(inline="always")
def _local_mean(here, above, below, scales):
    return here * scales[0] + above * scales[1] + below * scales[2]


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _measure_block(centred, beside, first, last, up, down):
    """Sums over a block: the low band, its squares, the high band's squares, the high band's absolute values."""
    scales = _scales(up, down)
    total_tilt = total_low = total_high = total_size = 0.0
    for begin in range(first, last, _RUN):
        end = min(begin + _RUN, last)
        here, above, below = beside[begin:end], beside[begin + up : end + up], beside[begin + down : end + down]
        row = centred[begin:end]
        tilt = low = high = size = np.float32(0.0)
        for k in range(len(row)):
            smooth = _local_mean(here[k], above[k], below[k], scales)
            rough = row[k] - smooth
            tilt += smooth
            low += smooth * smooth
            high += rough * rough
            size += abs(rough)
        total_tilt, total_low = total_tilt + float(tilt), total_low + float(low)
        total_high, total_size = total_high + float(high), total_size + float(size)
    return total_tilt, total_low, total_high, total_size


@njit(nogil=True, cache=True)
def _write(planes, begin, end, width, terms, residual, least, into):
    """Write maps `begin` to `end - 1` as start + gain * part + ..., or unchanged if one of their `terms` is not finite.

    Then add the `residual`, unless it is None, and raise values below `least` to it.
    """
    n = planes.shape[1]
    centred, beside = np.empty(n, np.float32), np.empty(n, np.float32)
    for p in range(begin, end):
        finite = True
        for value in terms[p]:
            finite = finite and np.isfinite(value)
        mean, start, low = terms[p, 0], terms[p, 1], terms[p, 2]
        residual_plane = None if residual is None else residual[p]
        if not finite:
            _write_unchanged(planes[p], residual_plane, least, into[p])
        elif terms.shape[1] == 3:
            _write_plane(planes[p], mean, start, low, residual_plane, least, into[p])
        else:
            _centre(planes[p], mean, centred)
            _smooth_rows(centred, width, beside)
            for first, last, up, down in _blocks(n, width):
                part = None if residual is None else residual[p, first:last]
                _write_block(centred, beside, first, last, up, down, start, low, terms[p, 3], part, least, into[p])


@njit(inline="always")
def _finish(value, residual, k, least):
    """Add the residual and apply the relu. None is a type of its own, for which numba compiles code without the sum."""
    if residual is not None:
        value = value + residual[k]
    return least if value < least else value


@njit(nogil=True, cache=True)
def _write_unchanged(plane, residual, least, into):
    for k in range(len(plane)):
        into[k] = _finish(plane[k], residual, k, least)


@njit(nogil=True, cache=True)
def _write_plane(plane, mean, start, gain, residual, least, into):
    for k in range(len(plane)):
        into[k] = _finish(start + gain * (plane[k] - mean), residual, k, least)


@njit(nogil=True, cache=True)
def _write_block(centred, beside, first, last, up, down, start, low, high, residual, least, into):
    scales = _scales(up, down)
    here, above, below = beside[first:last], beside[first + up : last + up], beside[first + down : last + down]
    row, out = centred[first:last], into[first:last]
    for k in range(len(row)):
        smooth = _local_mean(here[k], above[k], below[k], scales)
        out[k] = _finish(start + low * smooth + high * (row[k] - smooth), residual, k, least)
