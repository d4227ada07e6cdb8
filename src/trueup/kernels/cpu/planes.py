"""The loops over maps for the rule of evidence on the CPU, compiled by numba.

`MEASURE`, `REALIGN` and `REALIGN_CHANNELS_LAST` are addresses of functions that take the address of a job: an array of
`SIZE` int64. Threads share a job and take maps from it until none is left.

All of this is one file, because numba's cache does not notice when a function in another file changes.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from trueup.functional.evidence import FARTHEST, LARGEST_EVIDENCE
from trueup.kernels.cpu.numba_jit import at_address, callback, fetch_add, njit

GROUP = 8  # neighbouring channels copied at a time from maps whose channels lie last: 400 KB for maps of 112 x 112
MEASURED = 6  # numbers per map: five moments and the low band's residual mean
_RUN = 1024  # values summed in float32; the sums of runs are added in float64
_APART = 16  # values between copied planes: planes of a power of two would compete for the same lines of the cache

# The job, mostly addresses. 0 means none.
JOB = ("next", "maps", "out", "residual", "reference", "gate", "planes", "channels", "n", "width", "numbers", "chunk")
_NEXT, _MAPS, _OUT, _RESIDUAL, _REFERENCE, _GATE, _PLANES, _CHANNELS, _N, _WIDTH, _NUMBERS, _CHUNK = range(len(JOB))
_NORM = len(JOB)  # then the norm: mean, variance, weight, bias
SIZE = _NORM + 4


def _measure_planes(address):
    """Measure planes until none is left; write `MEASURED` numbers for each to `out`."""
    job = carray(address, SIZE)
    planes, n, width = job[_PLANES], job[_N], job[_WIDTH]
    maps = carray(at_address(job[_MAPS]), (planes, n), np.float32)
    found = carray(at_address(job[_OUT]), (planes, MEASURED), np.float32)
    memory = np.empty(2 * (n + width), np.float32)
    centred, beside = _scratch(memory, n)
    while True:
        begin = fetch_add(address, job[_CHUNK])
        if begin >= planes:
            break
        for p in range(begin, min(begin + job[_CHUNK], planes)):
            _copy(maps[p], centred)
            _measure(centred, width, True, beside, found[p])
    memory[0] = 0  # it must live until here


def _realign_planes(address):
    """Realign planes until none is left."""
    job = carray(address, SIZE)
    planes, channels, n, width = job[_PLANES], job[_CHANNELS], job[_N], job[_WIDTH]
    maps = carray(at_address(job[_MAPS]), (planes, n), np.float32)
    out = carray(at_address(job[_OUT]), (planes, n), np.float32)
    residual = carray(at_address(job[_RESIDUAL]), (planes, n), np.float32)
    reference = carray(at_address(job[_REFERENCE]), (5, 3 if width else 2, channels), np.float64)
    gate = carray(at_address(job[_GATE]), planes // channels, np.float32)
    numbers = carray(at_address(job[_NUMBERS]), 3, np.float32)
    least, most = numbers[0], numbers[1]  # as in torch's relu, NaN and -0 are not less than 0
    mean = carray(at_address(job[_NORM]), channels, np.float32)
    variance = carray(at_address(job[_NORM + 1]), channels, np.float32)
    weight = carray(at_address(job[_NORM + 2]), channels, np.float32)
    bias = carray(at_address(job[_NORM + 3]), channels, np.float32)
    memory = np.empty(2 * (n + width), np.float32)
    centred, beside = _scratch(memory, n)
    found, terms = np.empty(MEASURED, np.float32), np.empty(3, np.float32)
    while True:
        begin = fetch_add(address, job[_CHUNK])
        if begin >= planes:
            break
        image, c = begin // channels, begin % channels
        for p in range(begin, min(begin + job[_CHUNK], planes)):
            gain, offset = np.float32(1.0), np.float32(-0.0)  # these change nothing, not even the sign of a zero
            if job[_NORM]:
                gain, offset = _norm_of_channel(mean[c], variance[c], weight[c], bias[c], numbers[2])
            opened = np.float64(gate[image]) if job[_GATE] else np.float64(1.0)
            plane, moves = maps[p], opened > 0  # images whose gate value is 0 are not even measured
            if moves:
                if job[_NORM]:
                    _normalise(plane, gain, offset, centred)
                else:
                    _copy(plane, centred)
                _measure(centred, width, False, beside, found)
                moves = _coefficients(found, reference, c, opened, terms)
            if not moves and job[_OUT] == job[_MAPS]:  # numba has no vector code for a loop that writes what it reads
                _normalise(plane, gain, offset, centred)
                plane, gain, offset = centred, np.float32(1.0), np.float32(-0.0)
            if job[_RESIDUAL]:
                _write(plane, moves, width, gain, offset, terms, centred, beside, residual[p], least, most, out[p])
            else:
                _write(plane, moves, width, gain, offset, terms, centred, beside, None, least, most, out[p])
            c += 1  # a division for each plane takes longer
            if c == channels:
                image, c = image + 1, 0
    memory[0] = 0  # it must live until here


def _realign_channels_last(address):
    """Realign maps whose channels lie last, with the results of `_realign_planes`, until none is left.

    `GROUP` channels of an image at a time are copied to planes that follow each other, and back.
    """
    job = carray(address, SIZE)
    planes, channels, n, width = job[_PLANES], job[_CHANNELS], job[_N], job[_WIDTH]
    images = planes // channels
    maps = carray(at_address(job[_MAPS]), (images, n, channels), np.float32)
    out = carray(at_address(job[_OUT]), (images, n, channels), np.float32)
    residual = carray(at_address(job[_RESIDUAL]), (images, n, channels), np.float32)
    reference = carray(at_address(job[_REFERENCE]), (5, 3 if width else 2, channels), np.float64)
    gate = carray(at_address(job[_GATE]), images, np.float32)
    numbers = carray(at_address(job[_NUMBERS]), 3, np.float32)
    least, most, none = numbers[0], numbers[1], np.float32(np.inf)
    mean = carray(at_address(job[_NORM]), channels, np.float32)
    variance = carray(at_address(job[_NORM + 1]), channels, np.float32)
    weight = carray(at_address(job[_NORM + 2]), channels, np.float32)
    bias = carray(at_address(job[_NORM + 3]), channels, np.float32)
    group = GROUP * (n + _APART)
    memory = np.empty(group + 2 * (n + width), np.float32)
    copied = carray(at_address(np.int64(memory.ctypes.data)), (GROUP, n + _APART), np.float32)
    centred, beside = _scratch(memory[group:], n)
    found, terms = np.empty(MEASURED, np.float32), np.empty(3, np.float32)
    groups = -(-channels // GROUP)
    while True:
        begin = fetch_add(address, job[_CHUNK])
        if begin >= images * groups:
            break
        for share in range(begin, min(begin + job[_CHUNK], images * groups)):
            image, first = share // groups, share % groups * GROUP
            count = min(GROUP, channels - first)
            _gather(maps[image], first, count, copied)
            opened = np.float64(gate[image]) if job[_GATE] else np.float64(1.0)
            for j in range(count):
                plane, c = copied[j, :n], first + j
                gain, offset = np.float32(1.0), np.float32(-0.0)
                if job[_NORM]:
                    gain, offset = _norm_of_channel(mean[c], variance[c], weight[c], bias[c], numbers[2])
                _normalise(plane, gain, offset, centred)
                moves = opened > 0
                if moves:
                    _measure(centred, width, False, beside, found)
                    moves = _coefficients(found, reference, c, opened, terms)
                if moves:
                    _write(plane, moves, width, gain, offset, terms, centred, beside, None, -none, none, plane)
                elif job[_NORM]:
                    _normalise(plane, gain, offset, centred)
                    _copy(centred, plane)
            if job[_RESIDUAL]:
                _scatter(copied, first, count, residual[image], least, most, out[image])
            else:
                _scatter(copied, first, count, None, least, most, out[image])
    memory[0] = 0  # it must live until here


@njit
def _gather(image, first, count, planes):
    """Copy `count` channels of an image `(n, channels)` to planes."""
    if count == GROUP:  # a count that the compiler knows takes a third of the time
        for k in range(len(image)):
            values = image[k, first : first + GROUP]
            for j in range(GROUP):
                planes[j, k] = values[j]
    else:
        for k in range(len(image)):
            for j in range(count):
                planes[j, k] = image[k, first + j]


@njit
def _scatter(planes, first, count, residual, least, most, image):
    """Copy planes to the channels of an image; add the residual's, unless it is None, and limit the values."""
    if count == GROUP:
        for k in range(len(image)):
            into = image[k, first : first + GROUP]
            beside = None if residual is None else residual[k, first : first + GROUP]
            for j in range(GROUP):
                into[j] = _finish(planes[j, k], beside, j, least, most)
    else:
        for k in range(len(image)):
            into = image[k, first : first + count]
            beside = None if residual is None else residual[k, first : first + count]
            for j in range(count):
                into[j] = _finish(planes[j, k], beside, j, least, most)


@njit
def _scratch(memory, n):
    """Divide memory for one plane. Slices of these arrays are not counted, as numba counts those of its own arrays:
    that took longer than the rule on a small map.
    """
    address = np.int64(memory.ctypes.data)
    centred = carray(at_address(address), n, np.float32)
    return centred, carray(at_address(address + 4 * n), len(memory) - n, np.float32)


@njit(fastmath={"contract"}, error_model="numpy")
def _norm_of_channel(mean, variance, weight, bias, epsilon):
    """Gain and offset of a batch norm, rounded as by torch."""
    gain = weight * (np.float32(1.0) / np.sqrt(variance + epsilon))
    return gain, bias - mean * gain


@njit(error_model="numpy")
def _coefficients(found, reference, c, gate, terms):
    """Write start and gains of a plane into `terms`, as `evidence.coefficients`; return whether they are finite."""
    mean, tilt = np.float64(found[0]), np.float64(found[5])
    bands = reference.shape[1] == 3
    low = np.exp(_shift_of_deviation(found[2 if bands else 1], reference, 1, c, gate))
    high = np.exp(_shift_of_deviation(found[3], reference, 2, c, gate)) if bands else 0.0
    away, base = mean - reference[0, 0, c], reference[4, 0, c] * gate
    share = _share(away, reference, 0, c, gate)
    start = mean - (share * away + (1 - share) * (base * away)) + (high - low) * tilt
    terms[0], terms[1], terms[2] = np.float32(start), np.float32(low), np.float32(high)
    return np.isfinite(start + low + high)


@njit(error_model="numpy")
def _shift_of_deviation(variance, reference, j, c, gate):
    """Shift of a log-deviation, as `evidence.shifts`."""
    away = 0.5 * np.log(np.float64(variance) + reference[3, j, c]) - reference[0, j, c]
    share, base = _share(away, reference, j, c, gate), reference[4, j, c] * gate
    moved = share * away
    if base > 0:
        moved += (1 - share) * (0.5 * np.log(1 - base + base * np.exp(2 * min(max(away, -FARTHEST), FARTHEST))))
    return -moved


@njit(error_model="numpy")
def _share(away, reference, j, c, gate):
    """Share of the distance `away` that is moved by evidence, as `evidence.weight`."""
    z = away / reference[1, j, c]
    z2 = min(z * z, LARGEST_EVIDENCE) * gate
    return z2 / (z2 + reference[2, j, c])


@njit
def _copy(plane, into):
    for k in range(len(plane)):
        into[k] = plane[k]


@njit(fastmath={"contract"})
def _normalise(plane, gain, offset, into):
    """Write what torch's batch norm gives, to the last bit: so results do not depend on what is done in one pass."""
    for k in range(len(plane)):
        into[k] = gain * plane[k] + offset


@njit(error_model="numpy")
def _measure(plane, width, absolute, beside, found):
    """Write moments and residual mean of a plane into `found`; there are bands if `width` is not 0.

    The mean is subtracted from `plane`. With bands, `beside` is left holding the means over each row's neighbours, with
    a row more above and below.
    """
    n = len(plane)
    mean = np.float32(_sum(plane) / n)
    _subtract(mean, plane)
    found[0], found[1], found[5] = mean, 0.0, 0.0
    if absolute or not width:
        found[1] = _sum_of_squares(plane) / n
    if width:
        _smooth_rows(plane, width, beside)
        tilt, low, high, size = _measure_bands(plane, beside, width)
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
def _subtract(mean, plane):
    for k in range(len(plane)):
        plane[k] -= mean


@njit(error_model="numpy")
def _smooth_rows(plane, width, beside):
    """Write the mean of each value and its neighbours in the row into `beside`; at an end there is one neighbour.

    The row added above the first is the mean of the first two, so that the mean of three rows is that of these two;
    the same below.
    """
    n = len(plane)
    third, half = np.float32(1 / 3), np.float32(0.5)
    rows = beside[width : width + n]
    before, here, after, into = plane[:-2], plane[1:-1], plane[2:], rows[1:-1]
    for k in range(len(into)):  # one long loop that ignores the ends of rows; they follow
        into[k] = (before[k] + here[k] + after[k]) * third
    if width == 1:
        _copy(plane, rows)
    else:
        rows[0], rows[n - 1] = (plane[0] + plane[1]) * half, (plane[n - 2] + plane[n - 1]) * half
        # The end of a row and the start of the next lie side by side. Unsigned indices need no test for being negative.
        ends, into = plane[width - 2 :], rows[width - 1 :]
        at, step, one, two, three = np.uint64(0), np.uint64(width), np.uint64(1), np.uint64(2), np.uint64(3)
        for _ in range(n // width - 1):
            ended, begun = ends[at] + ends[at + one], ends[at + two] + ends[at + three]
            into[at], into[at + one] = ended * half, begun * half
            at += step
    other = width if n > width else 0
    first, second, above = rows[:width], rows[other : other + width], beside[:width]
    for k in range(len(above)):
        above[k] = (first[k] + second[k]) * half
    first, second, below = rows[n - width :], rows[n - width - other : n - other], beside[width + n :]
    for k in range(len(below)):
        below[k] = (first[k] + second[k]) * half


@njit(inline="always")
def _local_mean(above, here, below):
    return (above + here + below) * np.float32(1 / 3)


@njit(fastmath={"reassoc"})
def _measure_bands(centred, beside, width):
    """Sums over a plane: the low band, its squares, the high band's squares, the high band's absolute values."""
    total_tilt = total_low = total_high = total_size = 0.0
    for begin in range(0, len(centred), _RUN):
        row = centred[begin : begin + _RUN]
        end = begin + len(row)
        above, here, below = beside[begin:end], beside[begin + width : end + width], beside[begin + 2 * width :]
        tilt = low = high = size = np.float32(0.0)
        for k in range(len(row)):
            smooth = _local_mean(above[k], here[k], below[k])
            rough = row[k] - smooth
            tilt += smooth
            low += smooth * smooth
            high += rough * rough
            size += abs(rough)
        total_tilt, total_low = total_tilt + float(tilt), total_low + float(low)
        total_high, total_size = total_high + float(high), total_size + float(size)
    return total_tilt, total_low, total_high, total_size


@njit
def _write(plane, moves, width, gain, offset, terms, centred, beside, residual, least, most, into):
    """Write start + gain * part + ..., or gain * plane + offset if the plane does not move.

    Then add the `residual`, unless it is None, and limit values to `least` and `most`.
    """
    if not moves:
        _write_unmoved(plane, gain, offset, residual, least, most, into)
    elif not width:
        _write_plane(centred, terms[0], terms[1], residual, least, most, into)
    else:
        _write_bands(centred, beside, width, terms[0], terms[1], terms[2], residual, least, most, into)


@njit(inline="always")
def _finish(value, residual, k, least, most):
    """Add the residual and apply the relu. None is a type of its own, for which numba compiles code without the sum."""
    if residual is not None:
        value = value + residual[k]
    value = least if value < least else value
    return most if value > most else value


@njit(fastmath={"contract"})
def _write_unmoved(plane, gain, offset, residual, least, most, into):
    for k in range(len(plane)):
        into[k] = _finish(gain * plane[k] + offset, residual, k, least, most)


@njit
def _write_plane(centred, start, gain, residual, least, most, into):
    for k in range(len(centred)):
        into[k] = _finish(start + gain * centred[k], residual, k, least, most)


@njit
def _write_bands(centred, beside, width, start, low, high, residual, least, most, into):
    n = len(centred)
    above, here, below = beside[:n], beside[width : width + n], beside[2 * width :]
    for k in range(n):
        smooth = _local_mean(above[k], here[k], below[k])
        into[k] = _finish(start + low * smooth + high * (centred[k] - smooth), residual, k, least, most)


MEASURE, REALIGN, REALIGN_CHANNELS_LAST = (
    callback(function) for function in (_measure_planes, _realign_planes, _realign_channels_last)
)
