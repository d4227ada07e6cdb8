"""The gate in operators that every runtime has: a sum of ramps replaces the search among knots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trueup.functional.gate import KNOTS, Gate
from trueup.kernels.portable.precision import cast

STEEP = 1e30  # slope of a step between two equal knots


class GateConstants(NamedTuple):
    """A gate and the floors of its norms in the form that `gate_values` reads, float32.

    An increasing function that is linear between knots is a sum of ramps: the ramp of a cell rises from 0 to 1 between
    its two knots, as clamp((x - left) * slope + jump, 0, 1). Between equal knots it jumps.
    """

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
    left, width = gate.knots[:, :-1], gate.knots.diff(dim=1)
    flat = width <= 0
    step = 2 * gate.top / (KNOTS - 1)
    scores = torch.cat([gate.held, 2 * gate.held[-1:]])
    fall = (1 / scores.diff()).nan_to_num(posinf=STEEP).clamp(max=STEEP)

    def narrow(values: Tensor) -> Tensor:
        return values.float().contiguous()

    return GateConstants(
        left=narrow(left),
        slope=narrow(torch.where(flat, STEEP, 1 / width).clamp(max=STEEP)),
        jump=narrow(torch.where(flat, 0.5, 0.0)),
        ends=narrow(torch.stack([gate.knots[:, -1], gate.knots[:, 0]])),
        tails=narrow(1 / gate.tails),
        shift=narrow(-gate.top - gate.centre),
        step=narrow(step),
        whiten=narrow(gate.whiten),
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
    x = torch.cat([_features(*each) for each in zip(moments, c.floors, c.bands, strict=True)], dim=1)
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


def _features(moments: Tensor, floor: Tensor, bands: bool) -> Tensor:
    """As `functional.gate.features`."""
    moments = cast(moments, torch.float32)
    if not bands:
        return torch.cat([moments[:, 0], 0.5 * torch.log(moments[:, 1] + floor[1])], dim=1)
    mean, _, low, high, size = moments.unbind(1)
    high = 0.5 * torch.log(high + floor[3])
    size = 0.5 * torch.log(size.square() + 2 / math.pi * floor[3])
    return torch.cat([mean, 0.5 * torch.log(low + floor[2]), high, size - high], dim=1)
