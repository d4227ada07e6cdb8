"""The histogram method on the CPU, compiled by numba: one pass to count, a table, one pass to map.

Threads get whole rows if there are enough of them, otherwise parts of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
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
from trueup.kernels.cpu.numba_jit import njit
from trueup.kernels.threads import run_parallel

_BLOCK = 4096  # values per partial sum, so that a mean does not depend on how threads divide a row
_PART = 16 * _BLOCK  # values that justify another thread
_WIDEN = 1 << 20  # 16-bit values that are widened at a time


def transport_rows(rows: Tensor, curve: Tensor, step: float, *, keep: bool, sparse: bool, relu: bool) -> Tensor:
    """As `plain.transport_rows`."""
    out = torch.empty_like(rows)
    n = rows.shape[1]
    knots = _by_rank(curve.numpy(), n)
    # A table of all ranks pays off if there are many rows for their length; it would double the time of a single row.
    ranks = _at_every_rank(knots, n if len(rows) * 4 * BINS >= n else 0)
    limit = np.float32(torch.finfo(torch.float16).max if rows.dtype == torch.float16 else np.inf)
    rule = _Rule(int(offset_exponent(curve)), knots, ranks, step, keep, sparse, relu, limit)
    if rows.dtype == torch.float32:
        _transport(rows, out, rule)
        return out
    some = max(1, _WIDEN // n)
    for few, into in zip(rows.split(some), out.split(some), strict=True):
        wide = few.float()
        _transport(wide, wide, rule)
        into.copy_(wide)
    return out


class _Rule(NamedTuple):
    """Parameters of a correction, for the compiled functions. Caches of earlier versions contain this class's name."""

    offset: int  # exponent field, as from `offset_exponent`
    knots: np.ndarray  # (4, m), from `_by_rank`
    ranks: np.ndarray  # (2, n), from `_at_every_rank`, or (2, 0)
    step: float
    keep: bool
    sparse: bool
    relu: bool
    limit: np.float32  # largest value of the dtype of the result


def _transport(rows: Tensor, out: Tensor, rule: _Rule) -> None:
    """Write corrected float32 rows into `out`, which may be `rows` itself."""
    a, bits, into = rows.detach().numpy(), rows.detach().view(torch.int32).numpy(), out.numpy()
    batch, n = a.shape
    threads = torch.get_num_threads()
    if batch >= threads or n < 2 * _PART:
        shares = min(threads, batch, max(1, a.size // _PART))
        bounds = np.linspace(0, batch, shares + 1).astype(np.int64)
        run_parallel(lambda k: _whole_rows(a, bits, into, bounds[k], bounds[k + 1], rule), shares)
        return
    blocks = -(-n // _BLOCK)
    bounds = np.linspace(0, blocks, threads + 1).astype(np.int64)
    for row in range(batch):
        one = a[row], bits[row]
        counts, sums = np.empty((threads, _bins_of(rule)), np.int32), np.empty(blocks)
        run_parallel(lambda k: _count(*one, bounds[k], bounds[k + 1], rule.offset, rule.relu, counts[k], sums), threads)  # noqa: B023
        shift = np.empty(_bins_of(rule), np.float32)
        finite = _make_table(counts.sum(axis=0, dtype=np.int32), sums, n, rule, shift)
        run_parallel(lambda k: _map(*one, into[row], bounds[k], bounds[k + 1], rule, shift, finite), threads)  # noqa: B023


def quantile_rows(rows: Tensor, levels: Tensor) -> Tensor:
    """As `plain.quantile_rows`."""
    rows = rows.detach().float().contiguous()
    out = rows.new_empty(len(rows), len(levels))
    if rows.numel() == 0:
        return out
    low, high = rows.amin(dim=1), rows.amax(dim=1)  # six times faster than aminmax
    offsets = offset_exponent_of_row(torch.maximum(-low, high))
    known, which = offsets.unique(return_inverse=True)
    edges, positions = lower_edges(known[:, None]).double(), levels * (rows.shape[1] - 1)
    tensors = (rows, rows.view(torch.int32), out, positions, low, high, offsets, edges, which)
    arrays: tuple[Any, ...] = tuple(tensor.numpy() for tensor in tensors)
    shares = min(torch.get_num_threads(), len(rows), max(1, rows.numel() // _PART))
    bounds = np.linspace(0, len(rows), shares + 1).astype(np.int64)
    run_parallel(lambda k: _quantiles(*arrays, bounds[k], bounds[k + 1]), shares)
    return out


@njit
def _bins_of(rule):
    """Number of bins: after a relu there are no negative values."""
    return BINS if rule.relu else 2 * BINS


@njit
def _whole_rows(a, bits, into, begin, end, rule):
    """Correct rows `begin` to `end - 1`."""
    n = a.shape[1]
    blocks = -(-n // _BLOCK)
    counts, shift = np.empty(_bins_of(rule), np.int32), np.empty(_bins_of(rule), np.float32)
    sums = np.empty(blocks)
    for row in range(begin, end):
        _count(a[row], bits[row], 0, blocks, rule.offset, rule.relu, counts, sums)
        finite = _make_table(counts, sums, n, rule, shift)
        _map(a[row], bits[row], into[row], 0, blocks, rule, shift, finite)


@njit
def _count(a, bits, first_block, end_block, offset, relu, counts, sums):
    """Count the values of some blocks of a row into `counts`, and store each block's sum in `sums`."""
    n = len(a)
    # Four histograms take turns: two additions in a row to one bin, as for zeros, would wait for each other.
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


# The compiler may choose the order of the sum, so that it can use vectors; it is the same order every time.
@njit(fastmath={"reassoc"})
def _sum(a, relu):
    total = 0.0
    for i in range(len(a)):
        total += np.float64(np.float32(0.0) if relu and a[i] <= 0 else a[i])
    return total


@njit
def _bins(a, bits, offset, relu, bins):
    """Write the bin of each value into `bins`, as `bins.bin_of`."""
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


@njit
def _by_rank(curve, n):
    """Curve for rows of `n` values `(4, m)`: ranks instead of levels, and the slope of the quantile function.

    Reading this form takes no divisions, which took most of the time of making a table.
    """
    knots, m = np.empty((4, curve.shape[1])), curve.shape[1]
    scale = max(n - 1, 1)
    for j in range(m):
        knots[0, j], knots[1, j], knots[2, j] = curve[0, j] * scale, curve[1, j], curve[2, j] * scale
        if j:
            knots[3, j - 1] = (knots[1, j] - knots[1, j - 1]) / (knots[0, j] - knots[0, j - 1])
    knots[3, m - 1] = 0
    return knots


@njit
def _at_every_rank(knots, n):
    """Quantile function and its integral at all `n` ranks `(2, n)`, so that a table needs no search per bin."""
    ranks = np.empty((2, n))
    knot = 0
    for rank in range(n):
        ranks[0, rank], ranks[1, rank], knot = _read_curve(knots, float(rank) if n > 1 else 0.5, knot)
    return ranks


@njit
def _make_table(counts, sums, n, rule, shift):
    """Write the shift of each bin's values into `shift`; return whether the row is finite.

    The result has the same bits with `ranks` as without them, when they are `(2, 0)`.
    """
    ranks, step = rule.ranks, rule.step
    total = 0.0
    for block in range(len(sums)):
        total += sums[block]
    mean = total / n
    if not np.isfinite(mean):
        return False
    location = mean - _mean_over_ranks(rule.knots, 0, n, n, 0)[0] if rule.keep else 0.0
    first, knot = 0, 0
    if ranks.shape[1]:
        for b in range(len(counts)):
            last = max(first + counts[b] - 1, 0)
            low = min(first, n - 1)
            moved = _trapezoids(ranks[0, low], ranks[1, low], ranks[0, last], ranks[1, last], max(counts[b], 1))
            shift[b] = np.float32(step * (moved + location))
            first += counts[b]
        return True
    for b in range(len(counts)):
        if counts[b]:
            moved, knot = _mean_over_ranks(rule.knots, first, first + counts[b], n, knot)
            shift[b] = np.float32(step * (moved + location))
            first += counts[b]
    return True


@njit
def _mean_over_ranks(knots, first, end, n, knot):
    """As `plain.mean_over_ranks`. `knot` lies at or below the first rank; that of the last rank is returned too."""
    value, integral, knot = _read_curve(knots, first if n > 1 else 0.5, knot)
    last_value, last_integral, knot = _read_curve(knots, float(end - 1) if n > 1 else 0.5, knot)
    return _trapezoids(value, integral, last_value, last_integral, end - first), knot


@njit
def _trapezoids(value, integral, last_value, last_integral, count):
    """Mean over `count` ranks, from the quantile function and its integral at the first and at the last of them."""
    return ((last_integral - integral) + (value + last_value) / 2) / count


@njit
def _read_curve(knots, rank, knot):
    """Quantile function and its integral at a rank, and the knot below it, searched upwards from `knot`."""
    last = knots.shape[1] - 2
    while knot < last and knots[0, knot + 1] <= rank:
        knot += 1
    beyond = rank - knots[0, knot]
    value = knots[1, knot] + beyond * knots[3, knot]
    return value, knots[2, knot] + beyond * (knots[1, knot] + value) * 0.5, knot


@njit
def _map(a, bits, into, first_block, end_block, rule, shift, finite):
    """Write the corrected values of some blocks of a row into `into`."""
    relu, sparse, limit = rule.relu, rule.sparse, rule.limit
    rest, zero = np.float32(1 - rule.step), np.float32(0)
    bins, moves = np.empty(_BLOCK, np.uint16), np.empty(_BLOCK, np.float32)
    for block in range(first_block, end_block):
        values, out = a[block * _BLOCK : (block + 1) * _BLOCK], into[block * _BLOCK : (block + 1) * _BLOCK]
        if not finite:
            for i in range(len(values)):
                out[i] = zero if relu and values[i] <= 0 else values[i]
            continue
        _bins(values, bits[block * _BLOCK : (block + 1) * _BLOCK], rule.offset, relu, bins)
        for i in range(len(values)):  # a loop of its own, so that the next one is vectorised
            moves[i] = shift[bins[i]]
        for i in range(len(values)):
            value = zero if relu and values[i] <= 0 else values[i]
            moved = np.float32(value * rest) + moves[i]
            moved = min(max(moved, -limit), limit)
            out[i] = value if sparse and value == 0 else moved


@njit
def _quantiles(a, bits, out, positions, low, high, offsets, edges, which, begin, end):
    """Quantiles of rows `begin` to `end - 1` at `positions`: ranks, possibly fractional."""
    n = a.shape[1]
    blocks = -(-n // _BLOCK)
    counts, sums = np.empty(2 * BINS, np.int32), np.empty(blocks)
    for row in range(begin, end):
        positive, edge = low[row] >= 0, edges[which[row]]
        b, first = BINS if positive else 0, 0  # bin of the current rank, and the number of values below that bin
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


@njit
def _order_statistic(rank, n, low, high, edges, b, first, count):
    """Value of a rank, as if the values of its bin were evenly spaced."""
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
