"""The histogram method in Python's own numbers, a value at a time; and how far it may be from the exact rule."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from paper_loop import correct_row


def exact_row(a, target, *, step, keep, sparse):
    """The paper's rule in float64; `target` are order statistics, as many as `a` has values."""
    location = "keep" if keep else "match"
    return correct_row(a, target, lambda1=step, lambda2=0, iterations=1, location=location, sparse=sparse)


def bound(a, target, largest, *, step, keep):
    """Bound on the distance of each value of `a` from its exact place, before rounding.

    The target over the ranks that its bin takes up; and, where the mean is kept, what the mean of the target may miss
    by being taken from the integral: half a step between ranks at most.
    """
    reach = np.empty(len(a))
    for members, first in _bins(a, largest):
        reach[members] = target[first + len(members) - 1] - target[first]
    return step * (reach + (target[-1] - target[0]) / (2 * len(a)) * keep)


def histogram_row(a, curve, *, step, keep, sparse):
    """The specification: values that share a bin share the mean of the target over the ranks of the bin."""
    levels, values, _ = curve
    n = len(a)
    largest = max(abs(values[0]), abs(values[-1]))
    goal = _mean(levels, values, 0, n, n)
    out = np.empty(n)
    for members, first in _bins(a, largest):
        moved = _mean(levels, values, first, first + len(members), n)
        out[members] = a[members] * (1 - step) + step * (moved + (a.mean() - goal) * keep)
    return np.where(sparse & (a == 0), a, out)


def bin_of(value, largest):
    """The bin of a float32."""
    offset = min(max(_exponent(np.float32(largest)) - 3, 8), 248)
    size = np.float32(abs(value))
    shifted = size + np.float32(2.0 ** (offset - 127))
    fine = 256 * _exponent(shifted) + int(math.frexp(float(shifted))[0] * 512 - 256) - 256 * offset
    exponent = _exponent(size)
    index = exponent - min(max(exponent - (offset - 8), 0), 15) + min(max(fine, 0), 1792)
    return int(math.copysign(index, value))


def _exponent(value):
    """The exponent field of a float32; 0 for zero and denormals."""
    return max(math.frexp(float(value))[1] + 126, 0) if value else 0


def _bins(a, largest):
    """The values of each bin, as indices, and the rank of the first of them; in order."""
    members = defaultdict(list)
    for i, value in enumerate(a):
        members[bin_of(np.float32(value), largest)].append(i)
    first = 0
    for key in sorted(members):
        yield members[key], first
        first += len(members[key])


def _mean(levels, values, first, end, n):
    """The mean of the target over the ranks from `first` to before `end`: the trapezoids of its integral."""
    at = [0.5, 0.5] if n == 1 else [first / (n - 1), (end - 1) / (n - 1)]
    value, last = np.interp(at, levels, values)
    if end - first == 1:
        return value
    inside = levels[(levels > at[0]) & (levels < at[1])]
    knots = np.concatenate([at[:1], inside, at[1:]])
    area = np.trapezoid(np.interp(knots, levels, values), knots)
    return (area * (n - 1) + (value + last) / 2) / (end - first)
