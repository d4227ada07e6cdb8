"""The rule of evidence in torch's own operators."""

from __future__ import annotations

from torch import Tensor

from trueup.functional import evidence


def realign(
    x: Tensor, reference: Tensor, gate: Tensor | None, residual: Tensor | None, relu: bool, ceiling: float | None = None
) -> Tensor:
    """Return `evidence.realign` + residual, which may be None. If `relu`, limit values to 0 and `ceiling`."""
    return add_and_relu(evidence.realign(x, reference, gate), residual, relu, ceiling)


def moments(x: Tensor, bands: bool) -> Tensor:
    """Return `evidence.moments`."""
    return evidence.moments(x, bands=bands)


def add_and_relu(a: Tensor, residual: Tensor | None, relu: bool, ceiling: float | None = None) -> Tensor:
    """Add the residual, unless it is None. If `relu`, limit values to 0 and `ceiling`."""
    a = a if residual is None else a + residual
    if not relu:
        return a
    return a.relu() if ceiling is None else a.clamp(0.0, ceiling)
