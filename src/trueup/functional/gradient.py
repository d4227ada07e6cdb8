"""The derivative of `evidence.realign`, in few passes over the map.

Autograd would keep two more maps per call, in float32. Here the map enters through a few sums per channel: the
coefficients with which it is rebuilt depend on these alone, so only they are differentiated by autograd.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup.functional import evidence

__all__ = ["realign_gradients"]

_AT_ONCE = 1 << 19  # activations; on a CPU, the temporary maps of so many stay in the cache


def realign_gradients(a: Tensor, reference: Tensor, gate: Tensor | None, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with respect to `a` and to `reference`, given the `gradient` with respect to `evidence.realign`.

    The gate is a constant. Where a channel of an image is returned unchanged, its gradient passes unchanged.

    >>> a = torch.randn(2, 3, 8, 8, dtype=torch.float64).requires_grad_()
    >>> reference = torch.rand(5, 3, 3, dtype=torch.float64).requires_grad_()
    >>> found = realign_gradients(a.detach(), reference.detach(), None, torch.ones_like(a))
    >>> wanted = torch.autograd.grad(evidence.realign(a, reference).sum(), [a, reference])
    >>> all(torch.allclose(*pair) for pair in zip(found, wanted))
    True
    """
    whole = a.device.type != "cpu" or torch.compiler.is_compiling()
    channels = a.shape[1] if whole else max(1, _AT_ONCE * a.shape[1] // max(1, a.numel()))
    if channels >= a.shape[1]:
        return _gradients(a, reference, gate, gradient)
    parts = zip(
        *(torch.split(part, channels, dim) for part, dim in ((a, 1), (reference, 2), (gradient, 1))), strict=True
    )
    found = [_gradients(some, usual, gate, given) for some, usual, given in parts]
    return torch.cat([to_a for to_a, _ in found], dim=1), torch.cat([to_usual for _, to_usual in found], dim=2)


def _gradients(a: Tensor, reference: Tensor, gate: Tensor | None, gradient: Tensor) -> tuple[Tensor, Tensor]:
    wide, given = a.detach().to(torch.promote_types(a.dtype, torch.float32)), gradient
    mean = _total(wide) / _pixels(wide)
    centred = wide - _over_maps(mean, wide)
    bands = reference.shape[1] == 3
    low = evidence.local_mean(centred) if bands else centred
    parts = [low, centred - low] if bands else [centred]
    tilt = _total(low) / _pixels(wide) if bands else torch.zeros_like(mean)
    squares = torch.stack([_total(part.square()) / _pixels(wide) for part in parts])
    finite = mean.isfinite() & squares.isfinite().all(dim=0)
    with torch.enable_grad():  # zero in place of what is not finite: its derivatives would spoil those of the reference
        known = [torch.where(finite, part, 0).requires_grad_() for part in (mean, tilt, squares)]
        usual = reference.detach().requires_grad_()
        variances = (known[2] - known[1].square()).clamp(min=0)
        moments = torch.cat([known[0][:, None], variances.transpose(0, 1)], dim=1)
        terms = evidence.coefficients(moments, known[1], usual, gate)
    moves = finite & terms.isfinite().all(dim=1)
    if gate is not None:
        moves = moves & (gate > 0)[:, None]
    wanted = torch.where(_over_maps(moves, wide), given.to(wide.dtype), 0)
    sums = torch.stack([_total(wanted), *(_total(wanted * part) for part in parts)], dim=1)
    sums = torch.where(moves[:, None], sums, 0)
    to_mean, to_tilt, to_squares, to_reference = torch.autograd.grad(terms, [*known, usual], sums)
    per_pixel = 1 / _pixels(wide)
    through = [
        wanted * _over_maps(gain, wide) + part * _over_maps(2 * per_pixel * to_square, wide)
        for gain, part, to_square in zip(terms[:, 1:].detach().unbind(dim=1), parts, to_squares, strict=True)
    ]
    if bands:
        difference = through[0] - through[1] + _over_maps(per_pixel * to_tilt, wide)
        through = [through[1] + evidence.local_mean_adjoint(difference)]
    shared = per_pixel * (to_mean - _total(through[0]))
    found = torch.where(_over_maps(moves, wide), through[0] + _over_maps(shared, wide), given.to(wide.dtype))
    return found.to(a.dtype), to_reference


def _pixels(maps: Tensor) -> int:
    return math.prod(maps.shape[2:])


def _total(maps: Tensor) -> Tensor:
    """Sum over each map `(batch, channels)`."""
    return maps.flatten(2).sum(dim=2) if maps.dim() > 2 else maps


def _over_maps(values: Tensor, maps: Tensor) -> Tensor:
    return values.reshape(*values.shape, *[1] * (maps.dim() - 2))
