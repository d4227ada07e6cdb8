"""The rule of evidence in torch's own operators."""

from __future__ import annotations

from torch import Tensor

from trueup.functional import evidence


def realign(x: Tensor, reference: Tensor, gate: Tensor | None, residual: Tensor | None, relu: bool) -> Tensor:
    """Return relu(`evidence.realign` + residual); the residual may be None, the relu is applied only if asked for."""
    return add_and_relu(evidence.realign(x, reference, gate), residual, relu)


def moments(x: Tensor, bands: bool) -> Tensor:
    """Return `evidence.moments`."""
    return evidence.moments(x, bands=bands)


def add_and_relu(a: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """Add the residual, unless it is None, and apply the relu if asked for."""
    a = a if residual is None else a + residual
    return a.relu() if relu else a
