"""The gate in operators that every runtime has: a sum of ramps replaces the search among knots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.functional.gate import KNOTS, Gate
from trueup.kernels.portable.precision import cast

STEEP = 1e30  # no ramp is steeper
FLAT = 1e4  # slope at equal knots, over the range of all: float32 rarely meets a knot exactly, but by less than 1e-4
FARTHEST = 10.0  # log-deviation beyond which the counting does not begin: powers of e beyond may overflow


class GateConstants(NamedTuple):
    """A gate and the floors of its norms in the form that `gate_values` reads, float32.

    An increasing function that is linear between knots is a sum of ramps: the ramp of a cell rises from 0 to 1 between
    its two knots, as clamp((x - left) * slope + jump, 0, 1). Between equal knots it jumps.

    Features are counted from their middle knots, because the rounding of a small logarithm is small too. The means of
    all norms come first, then the logarithms, of variances instead of deviations: twice the feature.
    """

    middle: Tensor  # (means,): what the means are counted from
    unit: Tensor  # (logarithms,): factor of what a logarithm is taken of

    left: Tensor  # (d, cells): where each cell of each feature's normal scores begins
    slope: Tensor  # (d, cells)
    jump: Tensor  # (d, cells): 0.5 for equal knots, so that a feature equal to them gets the middle of their scores
    ends: Tensor  # (2, d): the last knot and the first
    tails: Tensor  # (2, d): score per unit of feature beyond them
    shift: Tensor  # (d,): score below the first knot, minus the mean
    step: Tensor  # (): score per cell
    whiten: Tensor  # (d, d)
    right: Tensor  # (n,): where each step of the p-value ends
    fall: Tensor  # (n,): its slope
    floors: tuple[Tensor, ...]  # per norm, (2 or 5, channels)
    bands: tuple[bool, ...]  # per norm, whether it has 5 floors
    held: int  # n


def gate_constants(gate: Gate, floors: Sequence[Tensor]) -> GateConstants:
    """Compute the constants of a gate."""
    means, logs = _places(floors)
    middle = gate.knots[means, KNOTS // 2].float()
    unit = (-2 * gate.knots[logs, KNOTS // 2].clamp(-FARTHEST, FARTHEST)).exp().float()
    knots = torch.cat([gate.knots[means] - middle[:, None], 2 * gate.knots[logs] + unit.double().log()[:, None]])
    tails = torch.cat([gate.tails[:, means], 2 * gate.tails[:, logs]], dim=1)
    order = means + logs
    left, width = knots[:, :-1], knots.diff(dim=1)
    flat, steep = width <= 0, FLAT / (knots[:, -1:] - knots[:, :1])
    step = 2 * gate.top / (KNOTS - 1)
    scores = torch.cat([gate.held, 2 * gate.held[-1:]])
    fall = (1 / scores.diff()).nan_to_num(posinf=STEEP).clamp(max=STEEP)

    def narrow(values: Tensor) -> Tensor:
        return values.float().contiguous()

    return GateConstants(
        middle=middle,
        unit=unit,
        left=narrow(left),
        slope=narrow(torch.where(flat, steep, 1 / width).clamp(max=STEEP)),
        jump=narrow(torch.where(flat, 0.5, 0.0)),
        ends=narrow(torch.stack([knots[:, -1], knots[:, 0]])),
        tails=narrow(1 / tails),
        shift=narrow(-gate.top - gate.centre[order]),
        step=narrow(step),
        whiten=narrow(gate.whiten[order]),
        right=narrow(scores[1:]),
        fall=narrow(fall),
        floors=tuple(narrow(floor) for floor in floors),
        bands=tuple(len(floor) == 5 for floor in floors),
        held=len(gate.held),
    )


def gate_values(
    moments: Sequence[Tensor], constants: GateConstants, budget: float, ramp: float, least: float
) -> Tensor:
    """As `trueup.kernels.gate_values`."""
    c = constants
    x = _features(moments, c)
    cells = _sum(((x[:, :, None] - c.left) * c.slope + c.jump).clamp(0, 1))
    beyond = (x - c.ends[0]).clamp(min=0) * c.tails[0] - (c.ends[1] - x).clamp(min=0) * c.tails[1]
    scores = cells * c.step + c.shift + beyond + 0 * x  # some runtimes lose NaN in a clamp
    found = _product(scores, c.whiten).square().mean(dim=1, keepdim=True)
    # Counted from the far end: a small p-value is a small sum, so rounding does not hurt it.
    p = (1 + _sum(((c.right - found) * c.fall).clamp(0, 1))) / (c.held + 1)
    g = (math.log(ramp * budget) - torch.log(p)) / math.log(ramp) if budget > 0 else torch.zeros_like(p)
    g = torch.where(found[:, 0] < torch.finfo(torch.float32).max, g.clamp(0, 1), 1.0 if budget > 0 else 0.0)
    return least + (1 - least) * g


def _sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, by a product: OpenVINO 2026.4 fuses what follows a sum, and then returns garbage."""
    return _product(x, x.new_ones(x.shape[-1], 1)).squeeze(-1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product, also under autocast, which would round float32 to 8 bits and leaves float64 alone."""
    if torch.is_autocast_enabled(a.device.type):
        return cast(a.double() @ b.double(), a.dtype)
    return a @ b


def _features(moments: Sequence[Tensor], constants: GateConstants) -> Tensor:
    """As `functional.gate.features` of all norms, in the order and the units of the constants."""
    means, squares = [], []
    for found, floor, bands in zip(moments, constants.floors, constants.bands, strict=True):
        rows = cast(found, torch.float32).unbind(1)
        means.append(rows[0])
        if bands:
            _, _, low, high, size = rows
            high = high + floor[3]
            squares += [low + floor[2], high, (size * size + 2 / math.pi * floor[3]) / high]
        else:
            squares.append(rows[1] + floor[1])
    logs = torch.log(torch.cat(squares, dim=1) * constants.unit)
    return torch.cat([torch.cat(means, dim=1) - constants.middle, logs], dim=1)


def _places(floors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Places of the means and of the logarithms among the features of a gate."""
    means: list[int] = []
    logs: list[int] = []
    for floor in floors:
        channels, first = floor.shape[1], len(means) + len(logs)
        means += range(first, first + channels)
        logs += range(first + channels, first + (4 if len(floor) == 5 else 2) * channels)
    return means, logs
