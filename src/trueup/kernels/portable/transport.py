"""The paper's rule in operators that every runtime has: a sort, and runs of equal values by counting."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trueup.functional.paper import Location
from trueup.functional.paper import levels as _dense_ends
from trueup.functional.ranges import within_range
from trueup.kernels.eager import is_jit_tracing
from trueup.kernels.portable.precision import cast, widened

Levels = Literal["even", "dense ends"]


class Target(NamedTuple):
    """Constants of a target, in the form that `correct` reads."""

    values: Tensor  # (m,) float32
    spacing: Levels
    m: int


def target_of(curve: Tensor, levels: Tensor | None) -> Target | None:
    """Return the target of a curve at these `levels`, or None if `calibrate` never spaces levels like that."""
    if levels is not None and not torch.allclose(
        levels.double(), _dense_ends(len(levels), device=levels.device), rtol=0, atol=1e-9
    ):
        return None
    return Target(curve[1].float(), "even" if levels is None else "dense ends", curve.shape[1])


def correct(a: Tensor, target: Target, step: float, *, location: Location, sparse: bool) -> Tensor:
    """As `functional.correct`."""
    if step == 0:
        return a.clone()
    wide = widened(a)
    row = wide.flatten(1) if a.dim() > 1 else wide[:, None]
    goal = _order_statistics(target._replace(values=cast(target.values, row.dtype)), row.shape[1])
    mean = row.mean(dim=1, keepdim=True)
    moved = _transport(row, goal)
    if location == "keep":
        moved = moved + (mean - goal.mean())
    out = within_range(row + step * (moved - row), a.dtype)
    stays = ~(mean.abs() < torch.finfo(row.dtype).max)
    if sparse:
        stays = stays | (row == 0)
    return cast(torch.where(stays, row, out).view(a.shape), a.dtype)


def _transport(rows: Tensor, target: Tensor) -> Tensor:
    """As `functional.transport`: each run of equal values gets the mean of the target over its ranks."""
    ordered, order = rows.detach().sort(dim=1)
    # Integers, because a row may have more values than float32 has whole numbers. Sums are float32, as some runtimes
    # have nothing wider: the mean over a run of millions of equal values is not exact.
    begins = torch.cat([torch.ones_like(order[:, :1]), (ordered[:, 1:] != ordered[:, :-1]).long()], dim=1)
    run = begins.cumsum(dim=1) - 1
    total = torch.zeros_like(ordered).scatter_add(1, run, target.expand_as(ordered))
    count = torch.zeros_like(run).scatter_add(1, run, torch.ones_like(run))
    shared = (total / count.clamp(min=1)).gather(1, run)
    return torch.zeros_like(ordered).scatter(1, order, shared)


def _order_statistics(target: Target, n: int) -> Tensor:
    """As `functional.order_statistics`. If levels are dense at the ends, their formula gives the place of a rank.

    Each half is counted from its own end, where float32 is most precise.
    """
    values, spacing, m = target
    rank = torch.arange(n, dtype=torch.float32, device=values.device)
    single = not is_jit_tracing() and n == 1  # under jit.trace, n is not a number
    near = rank + 0.5 if single else torch.minimum(rank, n - 1 - rank) / (n - 1)
    angle = math.pi / 2 / (m - 1)
    place = near * (m - 1) if spacing == "even" else near.sqrt().asin() / angle
    left = place.floor().clamp(max=m - 2)
    if spacing == "even":
        weight = place - left
    else:
        low, high = (left * angle).sin().square(), ((left + 1) * angle).sin().square()
        weight = ((near - low) / (high - low)).clamp(0, 1)
    upper = rank + rank > n - 1
    first = torch.where(upper, m - 1 - left, left).long()
    below, above = values[first], values[torch.where(upper, first - 1, first + 1)]
    return below + cast(weight, values.dtype) * (above - below)
