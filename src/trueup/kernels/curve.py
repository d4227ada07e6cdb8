"""A target in the form that kernels read: a piecewise linear quantile function and its integral."""

from __future__ import annotations

import torch
from torch import Tensor


def curve_of(target: Tensor, levels: Tensor | None = None) -> Tensor:
    """Convert a target to a curve `(3, m)`, float64: levels u from 0 to 1, values Q(u), and the integral of Q up to u.

    `target` `(m,)` is ascending and known at `levels`, evenly spaced unless given, as in `functional.quantile`. Q is
    linear between levels, so its integral is exact. A single value is a constant.

    >>> curve_of(torch.tensor([0.0, 10.0, 40.0]))
    tensor([[ 0.0000,  0.5000,  1.0000],
            [ 0.0000, 10.0000, 40.0000],
            [ 0.0000,  2.5000, 15.0000]], dtype=torch.float64)
    """
    values = target.detach().double()
    if len(values) == 1:
        values, levels = values.expand(2), None
    if levels is None:
        levels = torch.linspace(0, 1, len(values), dtype=torch.float64, device=values.device)
    integral = torch.cumulative_trapezoid(values, levels.double())
    return torch.stack([levels.double(), values, torch.nn.functional.pad(integral, (1, 0))])
