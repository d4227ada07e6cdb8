"""The gate in torch's own operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trueup.functional import gate as definition
from trueup.functional.gate import Gate


def gate_values(
    moments: Sequence[Tensor], floors: Sequence[Tensor], gate: Gate, budget: float, ramp: float, least: float
) -> Tensor:
    """As `trueup.kernels.gate_values`."""
    seen = [definition.features(m.detach(), floor) for m, floor in zip(moments, floors, strict=True)]
    g = definition.gate_values(gate.p_values(torch.cat(seen, dim=1)), budget, ramp).float()
    values: Tensor = least + (1 - least) * g
    return values
