"""The paper's mathematics: quantile functions, barycenter, distance, and the correction by 1-D optimal transport.

A *row* holds all activations of one image at one site; every function treats each row on its own. A *target* is an
ascending vector: the order statistics of a distribution or, if its length differs from the row's, points of a quantile
function.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from trueup.functional.ranges import within_range

__all__ = [
    "as_rows",
    "barycenter",
    "correct",
    "levels",
    "order_statistics",
    "quantile",
    "spread",
    "transport",
    "wasserstein",
]

Location = Literal["keep", "match"]


def correct(
    a: Tensor,
    target: Tensor,
    step: float,
    *,
    location: Location = "keep",
    sparse: bool = True,
    levels: Tensor | None = None,
) -> Tensor:
    """Move each row of `a` towards `target` and keep its order: the paper's appendix in closed form.

    `a` is `(batch, ...)`, floating point of any width and layout; the result has its shape, dtype and layout and
    shares no memory with it. With ranks taken over the whole row,

        corrected = a + step * (target[rank(a)] - a)                    location="match"
        corrected = a + step * (target'[rank(a)] - a')                  location="keep", x' = x - mean(x)

    - Equal values share the mean of the target over the ranks they occupy, so equal inputs give equal outputs.
    - With `sparse`, zeros (of either sign) keep their value but still occupy ranks.
    - A target of another length than the row is read as a quantile function from minimum to maximum, known at `levels`
      or, without them, at even levels.
    - A step of 0 returns the bits of `a`. So does a row that contains NaN or infinity.

    >>> a = torch.tensor([[0.0, 3.0, 1.0, 1.0]])
    >>> target = torch.tensor([0.0, 2.0, 4.0, 6.0])
    >>> correct(a, target, 1.0, location="match")
    tensor([[0., 6., 3., 3.]])
    >>> correct(a, target, 0.5, location="match")
    tensor([[0.0000, 4.5000, 2.0000, 2.0000]])
    """
    _check_activations("correct", a)
    _check_target("correct", target)
    if step == 0 or a.numel() == 0:
        return a.clone()
    row = as_rows(a)
    goal = order_statistics(target.to(row.device), row.shape[1], levels=levels)
    mean = row.mean(dim=1, keepdim=True, dtype=torch.float64)
    moved = transport(row, goal.to(row.dtype))
    if location == "keep":
        moved = moved + (mean - goal.mean(dtype=torch.float64)).to(row.dtype)
    corrected = torch.lerp(row, moved, step)
    corrected = torch.where(mean.isfinite(), within_range(corrected, a.dtype), row)
    if sparse:
        corrected = torch.where(row == 0, row, corrected)
    return torch.empty_like(a).copy_(corrected.view(a.shape))


def transport(rows: Tensor, target: Tensor) -> Tensor:
    """Apply the optimal map in one dimension: the k-th smallest entry of a row goes to the k-th of `target`.

    `rows` is `(batch, n)`, `target` `(n,)` ascending. Equal entries share the mean of the target over the ranks they
    occupy (the barycentric projection of the optimal plan), so the map is a non-decreasing function of the value.

    >>> transport(torch.tensor([[5.0, 7.0, 5.0]]), torch.tensor([10.0, 20.0, 60.0]))
    tensor([[15., 60., 15.]])
    """
    ordered, order = rows.detach().sort(dim=-1)
    n = ordered.shape[-1]
    rank = torch.arange(n, device=rows.device)
    changes = ordered[..., 1:] != ordered[..., :-1]
    starts = torch.nn.functional.pad(changes, (1, 0), value=True)
    ends = torch.nn.functional.pad(changes, (0, 1), value=True)
    first = torch.where(starts, rank, 0).cummax(dim=-1).values  # rank of a run of equal values, and one past its last
    last = torch.where(ends, rank + 1, n).flip(-1).cummin(dim=-1).values.flip(-1)
    cumulative = torch.nn.functional.pad(target.double().cumsum(0), (1, 0))
    shared = (cumulative[last] - cumulative[first]) / (last - first)
    moved = torch.where(starts & ends, target, shared.to(target.dtype))
    return torch.empty_like(moved).scatter_(-1, order, moved)


def barycenter(rows: Tensor) -> Tensor:
    """Wasserstein barycenter of the rows: the mean of each order statistic.

    `rows` is `(m, ...)`; the result is an ascending vector as long as a row.

    >>> barycenter(torch.tensor([[3.0, 1.0], [5.0, 9.0]]))
    tensor([3., 6.])
    """
    _check_activations("barycenter", rows)
    ordered = as_rows(rows).sort(dim=-1).values
    return ordered.mean(dim=0, dtype=torch.float64).to(ordered.dtype)


def spread(rows: Tensor) -> Tensor:
    """Standard deviation of each order statistic over rows: the appendix's σ.

    >>> spread(torch.tensor([[3.0, 1.0], [5.0, 9.0]]))
    tensor([2., 3.])
    """
    _check_activations("spread", rows)
    ordered = as_rows(rows).sort(dim=-1).values
    return ordered.double().std(dim=0, correction=0).to(ordered.dtype)


def wasserstein(a: Tensor, target: Tensor, r: float = 1.0) -> Tensor:
    """r-Wasserstein distance of each row to `target`, both as empirical measures.

    `a` is `(batch, ...)`, `target` an ascending vector of any length; the result `(batch,)`. Each value carries the
    mass 1/n, so the distance does not grow with the number of activations; the paper's unnormalised sum is
    `n ** (1 / r)` times this. Nothing is centred: subtract means first for the paper's W(p(a'), q(t)).

    >>> wasserstein(torch.tensor([[1.0, 3.0], [3.0, 3.0]]), torch.tensor([1.0, 2.0]))
    tensor([0.5000, 1.5000])
    """
    _check_activations("wasserstein", a)
    _check_target("wasserstein", target)
    if not r >= 1:
        raise ValueError(f"wasserstein(r={r!r}): the order of the distance must be at least 1")
    row = as_rows(a).sort(dim=-1).values
    n, m = row.shape[1], target.shape[0]
    goal = target.to(row)
    if n == m:
        mass, gap = torch.full((n,), 1 / n, dtype=torch.float64, device=row.device), row - goal
    else:
        # Two step functions: constant between the multiples of 1/n and 1/m. Integers of 1/(n m) compare exactly.
        ends = torch.cat([k * torch.arange(1, to + 1, device=row.device) for to, k in ((n, m), (m, n))]).sort().values
        mass = torch.diff(ends, prepend=ends.new_zeros(1)).double() / (n * m)
        gap = row[:, (ends - 1) // m] - goal[(ends - 1) // n]
    gap = gap.abs().double()
    if math.isinf(r):
        return gap.amax(dim=1).to(row.dtype)
    return ((gap**r * mass).sum(dim=1) ** (1 / r)).to(row.dtype)


def quantile(values: Tensor, at: Tensor, *, levels: Tensor | None = None) -> Tensor:
    """Read quantile functions at the levels `at` by linear interpolation.

    `values` is `(..., m)`, ascending, known at `levels` `(m,)` from 0 (the minimum) to 1 (the maximum), evenly spaced
    unless given. The result is `(..., len(at))`.

    >>> quantile(torch.tensor([0.0, 10.0, 40.0]), torch.tensor([0.0, 0.25, 1.0]))
    tensor([ 0.,  5., 40.])
    """
    m = values.shape[-1]
    if m == 1:
        return values.expand(*values.shape[:-1], at.shape[0])
    at = at.double()
    if levels is None:
        position = at * (m - 1)
        left = position.long().clamp(max=m - 2)
        weight = position - left
    else:
        left = (torch.searchsorted(levels, at, right=True) - 1).clamp(0, m - 2)
        weight = (at - levels[left]) / (levels[left + 1] - levels[left])
    return torch.lerp(values[..., left], values[..., left + 1], weight.to(values.dtype))


def order_statistics(values: Tensor, n: int, *, levels: Tensor | None = None) -> Tensor:
    """Expand a quantile function to `n` order statistics: its values at n even levels from 0 to 1.

    >>> order_statistics(torch.tensor([0.0, 10.0, 40.0]), 5)
    tensor([ 0.,  5., 10., 25., 40.])
    """
    if levels is None and n == values.shape[-1]:
        return values
    rank = torch.arange(n, dtype=torch.float64, device=values.device)
    at = rank / (n - 1) if n > 1 else rank + 0.5  # a single value is compared with the median
    return quantile(values, at, levels=levels)


def levels(m: int, *, device: torch.device | None = None) -> Tensor:
    """`m` quantile levels from 0 to 1 that are denser at both ends: sin²(π/2 · k/(m-1)), float64.

    Activations have long tails that matter and a smooth middle. The spacing at the ends is (π/2m)², so a thousand
    levels resolve the largest two of 400,000 activations.

    >>> levels(5)
    tensor([0.0000, 0.1464, 0.5000, 0.8536, 1.0000], dtype=torch.float64)
    """
    if m < 2:
        raise ValueError(f"levels({m}): a quantile function needs at least two levels, its minimum and maximum")
    angle = torch.linspace(0, math.pi / 2, m, dtype=torch.float64, device=device)
    grid = angle.sin() ** 2
    grid[-1] = 1.0
    return grid


def as_rows(a: Tensor) -> Tensor:
    """Flatten activations `(batch, ...)` to `(batch, n)` in the precision of the computation: float64, else float32."""
    wide = a if a.dtype == torch.float64 else a.float()
    return wide.flatten(1) if a.dim() > 1 else wide[:, None]


def _check_activations(caller: str, a: Tensor) -> None:
    if a.dim() == 0 or not a.is_floating_point():
        raise TypeError(
            f"{caller}: expected floating-point activations of shape (batch, ...), got {a.dtype} of shape "
            f"{tuple(a.shape)}"
        )


def _check_target(caller: str, target: Tensor) -> None:
    if target.dim() != 1 or target.shape[0] == 0:
        raise ValueError(
            f"{caller}: expected the target as an ascending vector, got shape {tuple(target.shape)}; "
            "trueup.functional.barycenter(rows) makes one"
        )
