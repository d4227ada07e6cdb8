"""The rule of evidence on the CPU, compiled by numba: one pass over each map to measure it, one to write it.

A map fits into the fastest cache, whereas torch's own operators write each step of each map to memory and read it back.
Each site is one call into compiled code that does not hold Python's lock. A single image has so few values that work in
Python would take longer than the rule itself, and threads would wait for one another.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from trueup.functional import evidence
from trueup.kernels.cpu.compile import at_address, callback, fetch_add, njit
from trueup.kernels.cpu.threads import run_native
from trueup.kernels.plain.maps import add_and_relu

_PART = 1 << 16  # values that justify another thread
_RUN = 1024  # values summed in float32; the sums of runs are added in float64
_MEASURED = 6  # numbers per map: five moments and the low band's residual mean

# Argument of the compiled code: one array of int64, mostly addresses. 0 means none.
_JOB = ("next", "maps", "out", "residual", "reference", "gate", "planes", "channels", "n", "width", "limits", "chunk")
_NEXT, _MAPS, _OUT, _RESIDUAL, _REFERENCE, _GATE, _PLANES, _CHANNELS, _N, _WIDTH, _LIMITS, _CHUNK = range(len(_JOB))
_Job = ctypes.c_int64 * len(_JOB)
_Limits = ctypes.c_float * 2  # of results: 0 or minus infinity, and a ReLU6's ceiling or infinity


def realign(
    x: Tensor,
    reference: Tensor,
    gate: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    ceiling: float | None = None,
) -> Tensor:
    """As `plain.realign`, for float32, bfloat16 or float16 `(batch, channels, ...)`; the layout of `x` is kept."""
    if x.numel() == 0:
        return x.clone()
    limits = _Limits(0.0 if relu else -math.inf, math.inf if ceiling is None else ceiling)
    if x.dtype == torch.float32 and x.is_contiguous() and (residual is None or residual.is_contiguous()):
        out = torch.empty_like(x)
        _realign_maps(x, reference, gate, out, residual, limits)
        return out
    maps = x.float().contiguous()
    out = torch.empty_like(maps)
    if x.dtype == torch.float32:
        _realign_maps(maps, reference, gate, out, None if residual is None else residual.contiguous(), limits)
        return torch.empty_like(x).copy_(out)
    _realign_maps(maps, reference, gate, out, None, _Limits(-math.inf, math.inf))
    if x.dtype == torch.float16:
        limit = torch.finfo(x.dtype).max
        out = torch.where(x.isfinite(), out.clamp(-limit, limit), out)
    # Round after each step to the narrow dtype.
    return torch.empty_like(x).copy_(add_and_relu(out.to(x.dtype), residual, relu, ceiling))


def moments(x: Tensor, bands: bool) -> Tensor:
    """As `plain.moments`, for float32, bfloat16 or float16 `(batch, channels, ...)`."""
    if x.numel() == 0:
        return evidence.moments(x, bands=bands)
    maps = x.float().contiguous()
    planes = maps.shape[0] * maps.shape[1]
    found = maps.new_empty(planes, _MEASURED)
    width = maps.shape[-1] if bands else 0
    _run(_MEASURE, maps, [found.data_ptr(), 0, 0, 0], planes, maps.shape[1], width, None)
    return found.view(*maps.shape[:2], _MEASURED).transpose(1, 2)[:, : 5 if bands else 2].contiguous()


def _realign_maps(
    maps: Tensor, reference: Tensor, gate: Tensor | None, out: Tensor, residual: Tensor | None, limits: Any
) -> None:
    """Write realigned maps plus residual, within the limits, into `out`; maps are contiguous float32.

    Images with gate 0 do not move.
    """
    known = (
        reference if reference.dtype == torch.float64 and reference.is_contiguous() else reference.double().contiguous()
    )
    opened = None if gate is None else gate.detach().float().contiguous()
    addresses = [0 if t is None else t.data_ptr() for t in (out, residual, known, opened)]
    width = maps.shape[-1] if reference.shape[1] == 3 else 0
    _run(_REALIGN, maps, addresses, maps.shape[0] * maps.shape[1], maps.shape[1], width, limits)


def _run(
    function: int, maps: Tensor, addresses: list[int], planes: int, channels: int, width: int, limits: Any
) -> None:
    """Call a compiled function on all planes, in as many threads as torch uses if there is enough to do."""
    size = maps.numel()
    shares = 1 if size < 2 * _PART else min(torch.get_num_threads(), planes, size // _PART)
    chunk = planes if shares == 1 else max(1, planes // (4 * shares))
    at = 0 if limits is None else ctypes.addressof(limits)
    job = _Job(0, maps.data_ptr(), *addresses, planes, channels, size // planes, width, at, chunk)
    run_native(function, job, shares)


def _measure_planes(address):
    """Measure planes until none is left; write `_MEASURED` numbers for each to `out`."""
    job = carray(address, len(_JOB))
    planes, n, width = job[_PLANES], job[_N], job[_WIDTH]
    maps = carray(at_address(job[_MAPS]), (planes, n), np.float32)
    found = carray(at_address(job[_OUT]), (planes, _MEASURED), np.float32)
    centred, beside = np.empty(n, np.float32), np.empty(n, np.float32)
    while True:
        begin = fetch_add(address, job[_CHUNK])
        if begin >= planes:
            break
        for p in range(begin, min(begin + job[_CHUNK], planes)):
            _measure(maps[p], width, True, centred, beside, found[p])


def _realign_planes(address):
    """Realign planes until none is left."""
    job = carray(address, len(_JOB))
    planes, channels, n, width = job[_PLANES], job[_CHANNELS], job[_N], job[_WIDTH]
    maps = carray(at_address(job[_MAPS]), (planes, n), np.float32)
    out = carray(at_address(job[_OUT]), (planes, n), np.float32)
    residual = carray(at_address(job[_RESIDUAL]), (planes, n), np.float32)
    k = 3 if width else 2
    reference = carray(at_address(job[_REFERENCE]), (5, k, channels), np.float64)
    gate = carray(at_address(job[_GATE]), planes // channels, np.float32)
    limits = carray(at_address(job[_LIMITS]), 2, np.float32)
    least, most = limits[0], limits[1]  # as in torch's relu, NaN and -0 are not less than 0
    centred, beside, found = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(_MEASURED, np.float32)
    terms = np.empty(3, np.float32)
    while True:
        begin = fetch_add(address, job[_CHUNK])
        if begin >= planes:
            break
        for p in range(begin, min(begin + job[_CHUNK], planes)):
            opened = np.float64(1.0)
            if job[_GATE]:
                opened = np.float64(gate[p // channels])
            moves = opened > 0  # images whose gate value is 0 are not even measured
            if moves:
                _measure(maps[p], width, False, centred, beside, found)
                moves = _coefficients(found, reference, p % channels, opened, terms)
            if job[_RESIDUAL]:
                _write(maps[p], moves, width, found[0], terms, centred, beside, residual[p], least, most, out[p])
            else:
                _write(maps[p], moves, width, found[0], terms, centred, beside, None, least, most, out[p])


@njit
def _coefficients(found, reference, c, gate, terms):
    """Write start and gains of a plane into `terms`, as `evidence.coefficients`; return whether they are finite."""
    mean, tilt = np.float64(found[0]), np.float64(found[5])
    k = reference.shape[1]
    start, finite = mean, True
    for j in range(k):
        centre, spread, kappa = reference[0, j, c], reference[1, j, c], reference[2, j, c]
        floor, base = reference[3, j, c], reference[4, j, c] * gate
        row = 0 if j == 0 else 1 if k == 2 else 1 + j
        value = np.float64(found[row])
        away = (0.5 * np.log(value + floor) if j else value) - centre
        z = away / spread
        z2 = min(z * z, 1e30) * gate
        share = z2 / (z2 + kappa)
        mixed = 0.0
        if base > 0 and j:
            mixed = 0.5 * np.log(1 - base + base * np.exp(2 * min(max(away, -20.0), 20.0)))
        elif base > 0:
            mixed = base * away
        moved = -(share * away + (1 - share) * mixed)
        if j:
            moved = np.exp(moved)
            terms[j] = np.float32(moved)
            start += moved * tilt if j == 2 else -moved * tilt
        else:
            start += moved
        finite = finite and np.isfinite(moved)
    terms[0] = np.float32(start)
    return finite and np.isfinite(start)


@njit
def _measure(plane, width, absolute, centred, beside, found):
    """Write moments and residual mean of a plane into `found`; there are bands if `width` is not 0.

    `centred` is left holding the plane minus its mean, and with bands `beside` the means over each row's neighbours.
    """
    n = len(plane)
    mean = np.float32(_sum(plane) / n)
    _centre(plane, mean, centred)
    found[0], found[1], found[5] = mean, 0.0, 0.0
    if absolute or not width:
        found[1] = _sum_of_squares(centred) / n
    if width:
        _smooth_rows(centred, width, beside)
        tilt = low = high = size = 0.0
        for first, last, up, down in _blocks(n, width):
            t, s, h, a = _measure_block(centred, beside, first, last, up, down)
            tilt, low, high, size = tilt + t, low + s, high + h, size + a
        tilt = tilt / n
        found[2], found[3] = max(low / n - tilt * tilt, 0.0), max(high / n - tilt * tilt, 0.0)
        found[4], found[5] = size / n, tilt


# The compiler may choose the order of these sums, so that it can use vectors. The order is the same every time only if
# the loop writes nothing: otherwise the code would check whether arrays overlap in memory, with an order for each case.
# Loops run over slices from 0, because an index that might be negative prevents vectorisation.
@njit(fastmath={"reassoc"})
def _sum(plane):
    total = 0.0
    for begin in range(0, len(plane), _RUN):
        run, part = plane[begin : begin + _RUN], np.float32(0.0)
        for k in range(len(run)):
            part += run[k]
        total += float(part)
    return total


@njit(fastmath={"reassoc"})
def _sum_of_squares(plane):
    total = 0.0
    for begin in range(0, len(plane), _RUN):
        run, part = plane[begin : begin + _RUN], np.float32(0.0)
        for k in range(len(run)):
            part += run[k] * run[k]
        total += float(part)
    return total


@njit
def _centre(plane, mean, centred):
    """Write the map minus its mean into `centred`."""
    for k in range(len(plane)):
        centred[k] = plane[k] - mean


@njit
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


@njit
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


@njit(fastmath={"reassoc"})
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


@njit
def _write(plane, moves, width, mean, terms, centred, beside, residual, least, most, into):
    """Write a plane as start + gain * part + ..., or unchanged if it does not move.

    Then add the `residual`, unless it is None, and limit values to `least` and `most`.
    """
    n = len(plane)
    if not moves:
        _write_unchanged(plane, residual, least, most, into)
    elif not width:
        _write_plane(plane, mean, terms[0], terms[1], residual, least, most, into)
    else:
        for first, last, up, down in _blocks(n, width):
            part = None if residual is None else residual[first:last]
            _write_block(centred, beside, first, last, up, down, terms[0], terms[1], terms[2], part, least, most, into)


@njit(inline="always")
def _finish(value, residual, k, least, most):
    """Add the residual and apply the relu. None is a type of its own, for which numba compiles code without the sum."""
    if residual is not None:
        value = value + residual[k]
    value = least if value < least else value
    return most if value > most else value


@njit
def _write_unchanged(plane, residual, least, most, into):
    for k in range(len(plane)):
        into[k] = _finish(plane[k], residual, k, least, most)


@njit
def _write_plane(plane, mean, start, gain, residual, least, most, into):
    for k in range(len(plane)):
        into[k] = _finish(start + gain * (plane[k] - mean), residual, k, least, most)


@njit
def _write_block(centred, beside, first, last, up, down, start, low, high, residual, least, most, into):
    scales = _scales(up, down)
    here, above, below = beside[first:last], beside[first + up : last + up], beside[first + down : last + down]
    row, out = centred[first:last], into[first:last]
    for k in range(len(row)):
        smooth = _local_mean(here[k], above[k], below[k], scales)
        out[k] = _finish(start + low * smooth + high * (row[k] - smooth), residual, k, least, most)


_MEASURE, _REALIGN = (callback(function) for function in (_measure_planes, _realign_planes))
