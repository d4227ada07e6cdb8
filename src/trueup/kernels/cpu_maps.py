"""The rule of evidence on the CPU, compiled by numba: one pass over each map to measure it, one to write it.

A map is small enough for the fastest memory, where torch's own operators write each step of each map out and read it
back. What lies between the two passes, the rule itself, is `evidence.coefficients`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import njit
from torch import Tensor

from trueup.functional import evidence
from trueup.kernels.threads import share

_PART = 1 << 16  # values worth a thread of their own
_RUN = 1024  # values summed in float32; the sums of these are summed in float64


def realign_maps(
    maps: Tensor,
    reference: Tensor,
    openness: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    relu: bool = False,
) -> None:
    """As `evidence.realign`, of contiguous float32 maps `(batch, channels, height, width)`, into `out`.

    Maps of the same kind in `residual` are added, and what is below 0 set to it by `relu`. Images of openness 0 are
    not even measured.
    """
    bands = reference.shape[1] == 3
    moves = None if openness is None else openness > 0
    found = measure_maps(maps, bands=bands, only=moves)
    moments, tilt = found[:, [0, 2, 3] if bands else [0, 1]], found[:, 5]
    rule = torch.cat([found[:, :1], evidence.coefficients(moments, tilt, reference, openness)], dim=1)
    if moves is not None:
        rule = torch.where(moves[:, None, None], rule, torch.nan)  # to `_write`, to leave it as it is
    planes, into = _planes(maps), _planes(out)
    gains = rule.transpose(1, 2).reshape(len(planes), -1).contiguous().numpy()
    more = None if residual is None else _planes(residual)
    least = np.float32(0 if relu else -np.inf)  # as torch's relu, NaN is not less, nor is -0
    _shared(lambda begin, end: _write(planes, begin, end, maps.shape[3], gains, more, least, into), planes)


def measure_maps(maps: Tensor, *, bands: bool, only: Tensor | None = None) -> Tensor:
    """Of contiguous float32 maps: their five `evidence.moments`, and the low band's mean `(batch, 6, channels)`.

    Without `bands`, the last four are 0; so are all of an image that is not among `only` `(batch,)`.
    """
    planes, found = _planes(maps), np.zeros((maps.shape[0] * maps.shape[1], 6), np.float32)
    some = np.ones(len(planes), np.bool_) if only is None else only.repeat_interleave(maps.shape[1]).numpy()
    _shared(lambda begin, end: _measure(planes, begin, end, maps.shape[3] if bands else 0, some, found), planes)
    return torch.from_numpy(found).view(*maps.shape[:2], 6).transpose(1, 2)


def _planes(maps: Tensor) -> np.ndarray:
    """As rows, one a map; they share memory."""
    planes: np.ndarray = maps.detach().view(-1, maps.shape[2] * maps.shape[3]).numpy()
    return planes


def _shared(work: Callable[[int, int], None], planes: np.ndarray) -> None:
    shares = min(torch.get_num_threads(), len(planes), max(1, planes.size // _PART))
    bounds = np.linspace(0, len(planes), shares + 1).astype(np.int64)
    share(lambda k: work(bounds[k], bounds[k + 1]), shares)


@njit(nogil=True, cache=True)
def _measure(planes, begin, end, width, some, found):
    """What `measure_maps` tells of `some` maps from `begin` to `end`; there are bands if `width` is not 0."""
    n = planes.shape[1]
    centred, beside = np.empty(n, np.float32), np.empty(n, np.float32)
    for p in range(begin, end):
        if not some[p]:
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


# The order of a sum is the compiler's choice, so that it can use vectors: the same one every time, as long as the loop
# writes nothing. If it did, the order would be another where that lies close behind what is read, and might overlap.
# Loops run over slices from 0, because an index that might be negative keeps the compiler from vectors.
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
    """The map without its mean, into `centred`."""
    for k in range(len(plane)):
        centred[k] = plane[k] - mean


@njit(nogil=True, cache=True)
def _smooth_rows(plane, width, beside):
    """The mean of each value and those beside it in its row, into `beside`; of two at an end."""
    third, half = np.float32(1 / 3), np.float32(0.5)
    before, here, after, into = plane[:-2], plane[1:-1], plane[2:], beside[1:-1]
    for k in range(len(into)):  # as if there were no ends, which is one long loop, and then these
        into[k] = (before[k] + here[k] + after[k]) * third
    for first in range(0, len(plane), width):
        last = first + width - 1
        beside[first] = (plane[first] + plane[min(first + 1, last)]) * half
        beside[last] = (plane[max(last - 1, first)] + plane[last]) * half


@njit(nogil=True, cache=True)
def _blocks(n, width):
    """The first row, those in the middle and the last: where each begins and ends, and the rows above and below it."""
    if n == width:
        return (0, n, 0, 0), (n, n, 0, 0), (n, n, 0, 0)
    return (0, width, 0, width), (width, n - width, -width, width), (n - width, n, -width, 0)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _measure_block(centred, beside, first, last, up, down):
    """The sums over a block of the low band, of its squares, of the high band's, and of its absolute values."""
    scale = np.float32(1 / (1 + (up != 0) + (down != 0)))
    above_scale, below_scale = scale * np.float32(up != 0), scale * np.float32(down != 0)
    total_tilt = total_low = total_high = total_size = 0.0
    for begin in range(first, last, _RUN):
        end = min(begin + _RUN, last)
        here, above, below = beside[begin:end], beside[begin + up : end + up], beside[begin + down : end + down]
        row = centred[begin:end]
        tilt = low = high = size = np.float32(0.0)
        for k in range(len(row)):
            smooth = here[k] * scale + above[k] * above_scale + below[k] * below_scale
            rough = row[k] - smooth
            tilt += smooth
            low += smooth * smooth
            high += rough * rough
            size += abs(rough)
        total_tilt, total_low = total_tilt + float(tilt), total_low + float(low)
        total_high, total_size = total_high + float(high), total_size + float(size)
    return total_tilt, total_low, total_high, total_size


@njit(nogil=True, cache=True)
def _write(planes, begin, end, width, gains, residual, least, into):
    """Each map from `begin` to `end`: start + gain * part + ..., or as it is where one of these is no number.

    Then the `residual` is added, unless that is None, and what is less than `least` becomes that.
    """
    n = planes.shape[1]
    centred, beside = np.empty(n, np.float32), np.empty(n, np.float32)
    for p in range(begin, end):
        finite = True
        for value in gains[p]:
            finite = finite and np.isfinite(value)
        mean, start, low = gains[p, 0], gains[p, 1], gains[p, 2]
        more = None if residual is None else residual[p]
        if not finite:
            _finish(planes[p], more, least, into[p])
        elif gains.shape[1] == 3:
            _write_plane(planes[p], mean, start, low, more, least, into[p])
        else:
            _centre(planes[p], mean, centred)
            _smooth_rows(centred, width, beside)
            for first, last, up, down in _blocks(n, width):
                block = None if residual is None else residual[p, first:last]
                _write_block(centred, beside, first, last, up, down, start, low, gains[p, 3], block, least, into[p])


# A residual of None is one of another type, for which numba compiles these loops without it.
@njit(nogil=True, cache=True)
def _finish(plane, residual, least, into):
    for k in range(len(plane)):
        value = plane[k]
        if residual is not None:
            value = value + residual[k]
        into[k] = least if value < least else value


@njit(nogil=True, cache=True)
def _write_plane(plane, mean, start, gain, residual, least, into):
    for k in range(len(plane)):
        value = start + gain * (plane[k] - mean)
        if residual is not None:
            value = value + residual[k]
        into[k] = least if value < least else value


@njit(nogil=True, cache=True)
def _write_block(centred, beside, first, last, up, down, start, low, high, residual, least, into):
    scale = np.float32(1 / (1 + (up != 0) + (down != 0)))
    above_scale, below_scale = scale * np.float32(up != 0), scale * np.float32(down != 0)
    here, above, below = beside[first:last], beside[first + up : last + up], beside[first + down : last + down]
    row, out = centred[first:last], into[first:last]
    for k in range(len(row)):
        smooth = here[k] * scale + above[k] * above_scale + below[k] * below_scale
        value = start + low * smooth + high * (row[k] - smooth)
        if residual is not None:
            value = value + residual[k]
        out[k] = least if value < least else value
