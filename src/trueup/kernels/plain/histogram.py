"""The histogram method in torch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup.functional.ranges import within_range
from trueup.kernels.bins import BINS, bin_of, lower_edges, offset_exponent, offset_exponent_of_row


def transport_rows(rows: Tensor, curve: Tensor, step: float, *, keep: bool, sparse: bool, relu: bool) -> Tensor:
    """Move each row by the share `step` of its way towards the target; values in one bin count as equal.

    `rows` is `(batch, n)`, contiguous, float32, bfloat16 or float16. `curve` is the target as `curve_of` returns it, on
    the same device. `keep` keeps each row's mean; `sparse` keeps zeros; `relu` applies a ReLU first.
    """
    a = rows.float().relu() if relu else rows.float()
    n = a.shape[1]
    bins = bin_of(a, offset_exponent(curve), signed=not relu)
    count = a.new_zeros(len(a), BINS if relu else 2 * BINS, dtype=torch.int64)
    count.scatter_add_(1, bins, torch.ones_like(bins))
    last = count.cumsum(dim=1)
    moved = mean_over_ranks(curve, last - count, last, n)
    mean = a.mean(dim=1, keepdim=True, dtype=torch.float64)
    if keep:
        everything = torch.tensor([0, n], device=a.device)
        moved = moved + (mean - mean_over_ranks(curve, everything[:1], everything[1:], n))
    shift = (step * moved).float()
    out = within_range(a * (1 - step) + shift.gather(1, bins), rows.dtype)
    stays = ~mean.isfinite()
    if sparse:
        stays = stays | (a == 0)
    return torch.where(stays, a, out).to(rows.dtype)


def quantile_rows(rows: Tensor, levels: Tensor) -> Tensor:
    """As `trueup.kernels.quantile_rows`; `levels` are float64."""
    rows = rows.float()
    n = rows.shape[1]
    low, high = rows.aminmax(dim=1, keepdim=True)
    offset = offset_exponent_of_row(torch.maximum(-low, high))
    bins = bin_of(rows, offset, signed=True)
    count = rows.new_zeros(len(rows), 2 * BINS, dtype=torch.int64)
    count.scatter_add_(1, bins, torch.ones_like(bins))
    end = count.cumsum(dim=1)
    edges, signed = lower_edges(offset), torch.arange(-BINS, BINS, device=rows.device)
    index = signed.abs().clamp(max=BINS - 1)
    near, far = edges[:, index], edges[:, index + 1].masked_fill(signed == 0, 0)
    begins, ends = torch.where(signed < 0, -far, near), torch.where(signed < 0, -near, far)
    position = levels * (n - 1)
    rank = position.long()

    def order_statistic(rank: Tensor) -> Tensor:
        which = torch.searchsorted(end, rank.expand(len(rows), -1).contiguous(), right=True).clamp(max=2 * BINS - 1)
        inside = (rank - (end - count).gather(1, which) + 0.5).double() / count.gather(1, which)
        left, right = begins.gather(1, which).double(), ends.gather(1, which).double()
        value = torch.lerp(left, right, inside).clamp(low, high)
        return torch.where(rank == 0, low, torch.where(rank == n - 1, high, value))

    lower, upper = order_statistic(rank), order_statistic((rank + 1).clamp(max=n - 1))
    values = torch.lerp(lower.double(), upper.double(), position - rank).float()
    return values.masked_fill(~rows.sum(dim=1, keepdim=True, dtype=torch.float64).isfinite(), torch.nan)


def mean_over_ranks(curve: Tensor, first: Tensor, end: Tensor, n: int) -> Tensor:
    """Mean of the target over ranks `first` to `end - 1` of `n`: float64, of their shape.

    The ranks lie at even levels. The target counts as linear between them, so the trapezoids of its integral add up to
    the sum over ranks.
    """
    low, high = (_level_of_rank(rank, n) for rank in (first, end - 1))
    (value, integral), (last_value, last_integral) = _read_curve(curve, low), _read_curve(curve, high)
    total = (last_integral - integral) * (n - 1) + (value + last_value) / 2
    return torch.where(end - first == 1, value, total / (end - first).clamp(min=1))


def _level_of_rank(rank: Tensor, n: int) -> Tensor:
    rank = rank.double()
    return rank / (n - 1) if n > 1 else torch.full_like(rank, 0.5)  # as functional.order_statistics has it


def _read_curve(curve: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Quantile function of the target and its integral at each level."""
    levels, values, integral = curve.unbind()
    left = (torch.searchsorted(levels, level, right=True) - 1).clamp(0, levels.shape[0] - 2)
    beyond = level - levels[left]
    slope = (values[left + 1] - values[left]) / (levels[left + 1] - levels[left])
    value = values[left] + beyond * slope
    return value, integral[left] + beyond * (values[left] + value) / 2
