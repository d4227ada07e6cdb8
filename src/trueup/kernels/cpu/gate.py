"""The gate on the CPU: loops over features and images, compiled by numba, around one matrix product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trueup.functional.gate import Gate
from trueup.kernels.cpu.numba_jit import njit


def gate_values(
    moments: Sequence[Tensor], floors: Sequence[Tensor], gate: Gate, budget: float, ramp: float, least: float
) -> Tensor:
    """As `trueup.kernels.gate_values`."""
    batch, d = len(moments[0]), len(gate.centre)
    z = torch.empty(batch, d, dtype=torch.float64, device="cpu")
    values = torch.empty(batch, dtype=torch.float32, device="cpu")
    known = gate.knots.numpy(), gate.tails.numpy(), float(gate.top), gate.centre.numpy()
    first = 0
    for found, floor in zip(moments, floors, strict=True):
        rows = found.detach().float().contiguous().numpy()
        first = _normal_scores(rows, floor.double().contiguous().numpy(), *known, first, z.numpy())
    scores = (z @ gate.whiten).square_().mean(1)
    _write_gate_values(scores.numpy(), gate.held.numpy(), budget, ramp, least, values.numpy())
    return values


@njit
def _normal_scores(moments, floor, knots, tails, top, centre, first, z):
    """Write the centred scores of one norm's features from column `first` on; return the column after the last."""
    batch, rows, channels = moments.shape
    kinds = 2 if rows == 2 else 4
    step = 2 * top / (knots.shape[1] - 1)
    for image in range(batch):
        for kind in range(kinds):
            for c in range(channels):
                i = first + kind * channels + c
                x = _feature(moments[image, :, c], floor[:, c], kind)
                z[image, i] = _score(x, knots[i], tails[0, i], tails[1, i], top, step) - centre[i]
    return first + kinds * channels


@njit
def _feature(moments, floor, kind):
    """One of the features of a channel, as `functional.gate.features` orders them."""
    if kind == 0:
        return np.float64(moments[0])
    row = 1 if len(moments) == 2 else min(kind + 1, 3)
    deviation = 0.5 * math.log(np.float64(moments[row]) + floor[row])
    if kind < 3:
        return deviation
    size = np.float64(moments[4])
    return 0.5 * math.log(size * size + 2 / math.pi * floor[3]) - deviation


@njit
def _score(x, knots, above, below, top, step):
    """Normal score of a feature, as `functional.gate.normal_scores`."""
    last = len(knots) - 1
    beyond = max(x - knots[last], 0.0) / above - max(knots[0] - x, 0.0) / below
    if not math.isfinite(x):
        return x
    return (_knot_index(x, knots, False) + _knot_index(x, knots, True)) / 2 * step - top + beyond


@njit
def _knot_index(x, knots, right):
    """Fractional index of a feature among its knots: of equal knots, the last if `right`, else the first."""
    low, high = 0, len(knots)
    while low < high:
        middle = (low + high) // 2
        if knots[middle] < x or (right and knots[middle] == x):
            low = middle + 1
        else:
            high = middle
    i = min(max(low, 1), len(knots) - 1)
    width = knots[i] - knots[i - 1]
    if width > 0:
        share = min(max((x - knots[i - 1]) / width, 0.0), 1.0)
    else:
        share = 1.0 if x > knots[i - 1] or (right and x == knots[i - 1]) else 0.0
    return i - 1 + share


@njit
def _write_gate_values(scores, held, budget, ramp, least, values):
    """Write each image's gate value, from its p-value as `functional.gate` defines it."""
    n = len(held)
    for image in range(len(scores)):
        found = scores[image]
        p = 1.0
        if not math.isfinite(found):
            p = 0.0
        elif n:
            i = min(max(np.searchsorted(held, found), 1), n)
            under = held[i - 1]
            over = held[i] if i < n else 2 * held[n - 1]
            if over > under:
                share = min(max((found - under) / (over - under), 0.0), 1.0)
            else:
                share = 1.0 if found > under else 0.0
            p = (n + 2 - i - share) / (n + 1)
        g = 0.0
        if p < ramp * budget:
            g = min(max(math.log(ramp * budget / max(p, 1e-30)) / math.log(ramp), 0.0), 1.0)
        values[image] = least + (1 - least) * g
