"""The histogram method on the CPU, compiled by numba: one pass to count, a table, one pass to map.

Threads are Python's, which run compiled code side by side: as many as torch was told to use, and they sleep in between,
where the pool of another runtime would fight with torch's. Whole rows are dealt out to them where there are enough,
else parts of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from trueup.kernels.bins import (
    BINS,
    FINE,
    OCTAVES,
    OUTSIDE,
    SHIFT,
    SPAN,
    lower_edges,
    offset_exponent,
    offset_exponent_of_row,
)
from trueup.kernels.threads import share

_BLOCK = 4096  # values summed by themselves, so that a mean does not depend on how a row is shared among threads
_PART = 16 * _BLOCK  # values worth a thread of their own
_WIDEN = 1 << 20  # values of 16 bits that are widened at a time


def correct_rows(rows: Tensor, curve: Tensor, step: float, *, keep: bool, sparse: bool, relu: bool) -> Tensor:
    """As `plain.correct_rows`."""
    out = torch.empty_like(rows)
    n = rows.shape[1]
    knots = _by_rank(curve.numpy(), n)
    # Worth its time if rows are many for their length; it would double that of a single row.
    ranks = _at_every_rank(knots, n if len(rows) * 4 * BINS >= n else 0)
    limit = np.float32(torch.finfo(torch.float16).max if rows.dtype == torch.float16 else np.inf)
    rule = (int(offset_exponent(curve)), knots, ranks, step, keep, sparse, relu, limit)
    if rows.dtype == torch.float32:
        _correct(rows, out, rule)
        return out
    some = max(1, _WIDEN // n)
    for few, into in zip(rows.split(some), out.split(some), strict=True):
        wide = few.float()
        _correct(wide, wide, rule)
        into.copy_(wide)
    return out


def _correct(rows: Tensor, out: Tensor, rule: tuple[Any, ...]) -> None:
    """Correct float32 rows into `out`, which may be `rows` itself."""
    a, bits, into = rows.detach().numpy(), rows.detach().view(torch.int32).numpy(), out.numpy()
    batch, n = a.shape
    threads = torch.get_num_threads()
    if batch >= threads or n < 2 * _PART:
        shares = min(threads, batch, max(1, a.size // _PART))
        bounds = np.linspace(0, batch, shares + 1).astype(np.int64)
        share(lambda k: _whole_rows(a, bits, into, bounds[k], bounds[k + 1], rule), shares)
        return
    blocks = -(-n // _BLOCK)
    bounds = np.linspace(0, blocks, threads + 1).astype(np.int64)
    for row in range(batch):
        one = a[row], bits[row]
        counts, sums = np.empty((threads, _bins_of(rule)), np.int32), np.empty(blocks)
        share(lambda k: _count(*one, bounds[k], bounds[k + 1], rule[0], rule[6], counts[k], sums), threads)  # noqa: B023
        shift = np.empty(_bins_of(rule), np.float32)
        finite = _table(counts.sum(axis=0, dtype=np.int32), sums, n, rule, shift)
        share(lambda k: _map(*one, into[row], bounds[k], bounds[k + 1], rule, shift, finite), threads)  # noqa: B023


def quantile_rows(rows: Tensor, levels: Tensor) -> Tensor:
    """As `plain.quantile_rows`."""
    rows = rows.detach().contiguous()
    out = torch.empty(len(rows), len(levels))
    if rows.numel() == 0:
        return out
    low, high = rows.amin(dim=1), rows.amax(dim=1)  # six times as fast as aminmax
    offsets = offset_exponent_of_row(torch.maximum(-low, high))
    known, which = offsets.unique(return_inverse=True)
    edges, positions = lower_edges(known[:, None]).double(), levels * (rows.shape[1] - 1)
    tensors = (rows, rows.view(torch.int32), out, positions, low, high, offsets, edges, which)
    arrays: tuple[Any, ...] = tuple(tensor.numpy() for tensor in tensors)
    shares = min(torch.get_num_threads(), len(rows), max(1, rows.numel() // _PART))
    bounds = np.linspace(0, len(rows), shares + 1).astype(np.int64)
    share(lambda k: _quantiles(*arrays, bounds[k], bounds[k + 1]), shares)  # type: ignore[call-arg]
    return out


@njit(nogil=True, cache=True)
def _bins_of(rule):
    """How many bins a row has: it has no negative values after a relu."""
    return BINS if rule[6] else 2 * BINS


@njit(nogil=True, cache=True)
def _whole_rows(a, bits, into, begin, end, rule):
    """Correct the rows from `begin` to `end`."""
    n = a.shape[1]
    blocks = -(-n // _BLOCK)
    counts, shift = np.empty(_bins_of(rule), np.int32), np.empty(_bins_of(rule), np.float32)
    sums = np.empty(blocks)
    for row in range(begin, end):
        _count(a[row], bits[row], 0, blocks, rule[0], rule[6], counts, sums)
        finite = _table(counts, sums, n, rule, shift)
        _map(a[row], bits[row], into[row], 0, blocks, rule, shift, finite)


@njit(nogil=True, cache=True)
def _count(a, bits, first_block, end_block, offset, relu, counts, sums):
    """Count the values of some blocks of a row into `counts`, and sum each block."""
    n = len(a)
    # Four histograms in turn: adding to the same bin twice in a row, as for zeros, would wait for the first to be done.
    several = np.zeros((4, len(counts)), np.int32)
    bins = np.empty(_BLOCK, np.uint16)
    for block in range(first_block, end_block):
        begin, end = block * _BLOCK, min(n, (block + 1) * _BLOCK)
        sums[block] = _sum(a[begin:end], relu)
        _bins(a[begin:end], bits[begin:end], offset, relu, bins)
        for i in range(0, (end - begin) & ~3, 4):
            several[0, bins[i]] += np.int32(1)
            several[1, bins[i + 1]] += np.int32(1)
            several[2, bins[i + 2]] += np.int32(1)
            several[3, bins[i + 3]] += np.int32(1)
        for i in range((end - begin) & ~3, end - begin):
            several[0, bins[i]] += np.int32(1)
    for b in range(len(counts)):
        counts[b] = several[0, b] + several[1, b] + several[2, b] + several[3, b]


# The order of a sum over a block is the compiler's choice, so that it can use vectors: the same one every time.
@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _sum(a, relu):
    total = 0.0
    for i in range(len(a)):
        total += np.float64(np.float32(0.0) if relu and a[i] <= 0 else a[i])
    return total


@njit(nogil=True, cache=True)
def _bins(a, bits, offset, relu, bins):
    """The bin of each value into `bins`: as `plain.bin_of`."""
    lowest, start = np.int32(offset - OUTSIDE), np.int32(FINE * offset)
    added = np.float32(2.0 ** (offset - 127))
    shifted = np.empty(_BLOCK, np.float32)
    shifted_bits = shifted.view(np.int32)
    for i in range(len(a)):
        shifted[i] = abs(a[i]) + added
    for i in range(len(a)):
        exponent = np.int32((bits[i] >> 23) & 255)
        exponent = np.int32(exponent - min(max(np.int32(exponent - lowest), np.int32(0)), np.int32(SPAN)))
        fine = np.int32(shifted_bits[i] >> SHIFT)
        fine = min(max(np.int32(fine - start), np.int32(0)), np.int32(FINE * OCTAVES))
        index = np.int32(exponent + fine)
        if relu:
            index = index if bits[i] >= 0 else np.int32(0)
        else:
            index = np.int32(BINS + index) if bits[i] >= 0 else np.int32(BINS - index)
        bins[i] = np.uint16(index)


@njit(nogil=True, cache=True)
def _by_rank(curve, n):
    """The curve for rows of `n` values `(4, m)`, with ranks instead of levels, and the slope of the quantile function.

    It is then read without a division; these took most of the time of a table.
    """
    knots, m = np.empty((4, curve.shape[1])), curve.shape[1]
    scale = max(n - 1, 1)
    for j in range(m):
        knots[0, j], knots[1, j], knots[2, j] = curve[0, j] * scale, curve[1, j], curve[2, j] * scale
        if j:
            knots[3, j - 1] = (knots[1, j] - knots[1, j - 1]) / (knots[0, j] - knots[0, j - 1])
    knots[3, m - 1] = 0
    return knots


@njit(nogil=True, cache=True)
def _at_every_rank(knots, n):
    """The quantile function and its integral at all `n` ranks `(2, n)`, for a table with fewer surprises a bin."""
    ranks = np.empty((2, n))
    knot = 0
    for rank in range(n):
        ranks[0, rank], ranks[1, rank], knot = _read(knots, float(rank) if n > 1 else 0.5, knot)
    return ranks


@njit(nogil=True, cache=True)
def _table(counts, sums, n, rule, shift):
    """What to add to the values of each bin, into `shift`; returns whether the row is finite.

    The same to the last bit with `ranks` as without, where they are `(2, 0)`.
    """
    _, knots, ranks, step, keep, _, _, _ = rule
    total = 0.0
    for block in range(len(sums)):
        total += sums[block]
    mean = total / n
    if not np.isfinite(mean):
        return False
    location = mean - _mean_over_ranks(knots, 0, n, n, 0)[0] if keep else 0.0
    first, knot = 0, 0
    if ranks.shape[1]:
        for b in range(len(counts)):
            last = max(first + counts[b] - 1, 0)
            low = min(first, n - 1)
            area = ranks[1, last] - ranks[1, low]
            moved = (area + (ranks[0, low] + ranks[0, last]) / 2) / max(counts[b], 1)
            shift[b] = np.float32(step * (moved + location))
            first += counts[b]
        return True
    for b in range(len(counts)):
        if counts[b]:
            moved, knot = _mean_over_ranks(knots, first, first + counts[b], n, knot)
            shift[b] = np.float32(step * (moved + location))
            first += counts[b]
    return True


@njit(nogil=True, cache=True)
def _mean_over_ranks(knots, first, end, n, knot):
    """As `plain.mean_over_ranks`; `knot` is one at or below the first rank. Also returns the last rank's."""
    value, integral, knot = _read(knots, first if n > 1 else 0.5, knot)
    last_value, last_integral, knot = _read(knots, float(end - 1) if n > 1 else 0.5, knot)
    return ((last_integral - integral) + (value + last_value) / 2) / (end - first), knot


@njit(nogil=True, cache=True)
def _read(knots, rank, knot):
    """The target's quantile function and its integral at a rank, from the knot below it; and that knot."""
    last = knots.shape[1] - 2
    while knot < last and knots[0, knot + 1] <= rank:
        knot += 1
    beyond = rank - knots[0, knot]
    value = knots[1, knot] + beyond * knots[3, knot]
    return value, knots[2, knot] + beyond * (knots[1, knot] + value) * 0.5, knot


@njit(nogil=True, cache=True)
def _map(a, bits, into, first_block, end_block, rule, shift, finite):
    """Write the corrected values of some blocks of a row."""
    offset, _, _, step, _, sparse, relu, limit = rule
    rest, zero = np.float32(1 - step), np.float32(0)
    bins, moves = np.empty(_BLOCK, np.uint16), np.empty(_BLOCK, np.float32)
    for block in range(first_block, end_block):
        values, out = a[block * _BLOCK : (block + 1) * _BLOCK], into[block * _BLOCK : (block + 1) * _BLOCK]
        if not finite:
            for i in range(len(values)):
                out[i] = zero if relu and values[i] <= 0 else values[i]
            continue
        _bins(values, bits[block * _BLOCK : (block + 1) * _BLOCK], offset, relu, bins)
        for i in range(len(values)):  # by itself, so that what follows can be done in vectors
            moves[i] = shift[bins[i]]
        for i in range(len(values)):
            value = zero if relu and values[i] <= 0 else values[i]
            moved = np.float32(value * rest) + moves[i]
            moved = min(max(moved, -limit), limit)
            out[i] = value if sparse and value == 0 else moved


@njit(nogil=True, cache=True)
def _quantiles(a, bits, out, positions, low, high, offsets, edges, which, begin, end):
    """The order statistics at `positions`, some of them between two ranks, of the rows from `begin` to `end`."""
    n = a.shape[1]
    blocks = -(-n // _BLOCK)
    counts, sums = np.empty(2 * BINS, np.int32), np.empty(blocks)
    for row in range(begin, end):
        positive, edge = low[row] >= 0, edges[which[row]]
        b, first = BINS if positive else 0, 0  # the bin of the rank at hand, and how many values are below it
        _count(a[row], bits[row], 0, blocks, offsets[row], positive, counts[b:], sums)
        if not np.isfinite(sums.sum()):
            out[row] = np.nan
            continue
        for k in range(len(positions)):
            rank = int(positions[k])
            while first + counts[b] <= rank:
                first += counts[b]
                b += 1
            value = _order_statistic(rank, n, low[row], high[row], edge, b, first, counts[b])
            part = positions[k] - rank
            if part > 0:
                next_b, next_first = b, first
                while next_first + counts[next_b] <= rank + 1:
                    next_first += counts[next_b]
                    next_b += 1
                count = counts[next_b]
                following = _order_statistic(rank + 1, n, low[row], high[row], edge, next_b, next_first, count)
                value += part * (following - value)
            out[row, k] = np.float32(value)


@njit(nogil=True, cache=True)
def _order_statistic(rank, n, low, high, edges, b, first, count):
    """Where a rank lies in its bin, if the values there were even."""
    if rank == 0:
        return np.float64(low)
    if rank == n - 1:
        return np.float64(high)
    inside = (rank - first + 0.5) / count
    index = abs(b - BINS)
    if index == 0:
        return 0.0
    value = edges[index] + (inside if b >= BINS else 1 - inside) * (edges[index + 1] - edges[index])
    return min(max(value if b >= BINS else -value, np.float64(low)), np.float64(high))
