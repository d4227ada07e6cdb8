"""The mathematics of the gate: how unusual a whole image is, and how far it is opened to correction.

Pure functions on tensors, in float64. What an image's channels look like at a few norms are its *features*
`(images, d)`. A `Gate` is fitted to those of clean images: each feature becomes a normal score by its own quantiles,
and the scores together one squared distance, in which features that say the same count once. The fit is made on every
second image. The others stand for all clean images to come: the share of them that is as far away, made continuous, is
an image's p-value, and of new clean images no more than a share α has one of α or less.

>>> clean = torch.randn(400, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
>>> gate = fit(clean)
>>> p = gate.p_values(torch.tensor([[0.1, 0.2, -0.3], [9.0, 9.0, 9.0]], dtype=torch.float64))
>>> openness(p, 0.02)
tensor([0., 1.], dtype=torch.float64)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Gate", "features", "fit", "normal_scores", "openness", "shrinkage"]

RAMP = 20  # an image is opened fully at a p-value of the budget, and not at all from this many times it
KNOTS = 65  # at which a feature's quantiles are known
TAIL = 0.98  # scores go on beyond the last knot as they went from the middle to this quantile


class Gate(NamedTuple):
    """What clean images' features are like. Made by `fit`."""

    knots: Tensor  # (d, KNOTS): a feature's quantiles, at even steps of the normal score
    tails: Tensor  # (2, d): how much of a feature is one step of the score, above the last knot and below the first
    top: Tensor  # (): the score at the last knot; that at the first is the opposite
    centre: Tensor  # (d,): the mean of the scores
    whiten: Tensor  # (d, d): makes scores uncorrelated, each of variance 1
    held: Tensor  # (n,): ascending, what `scores` says of clean images that the fit has not seen

    def scores(self, features: Tensor) -> Tensor:
        """How far images are from clean ones `(images,)`: the mean square of their whitened normal scores."""
        return (
            ((normal_scores(features, self.knots, self.tails, self.top) - self.centre) @ self.whiten).square().mean(1)
        )

    def p_values(self, features: Tensor) -> Tensor:
        """The share of clean images, and the image itself, that are as far away `(images,)`; 0 for what is not finite.

        It falls in a straight line from one held-out image's score to the next, and never below the share itself, which
        falls in steps: rounding, which may differ from batch to batch, would then decide between two steps. The
        smallest for a finite image is 1 / (n + 1), from twice the largest score on.
        """
        found, n = self.scores(features), len(self.held)
        p = torch.ones_like(found)
        if n:
            scores = torch.cat([self.held, 2 * self.held[-1:]])
            i = torch.searchsorted(scores, found).clamp(1, n)
            below, above = scores[i - 1], scores[i]
            share = torch.where(above > below, (found - below) / (above - below), (found > below).double())
            p = (n + 2 - i - share.clamp(0, 1)) / (n + 1)
        return torch.where(found.isfinite(), p, 0.0)


def openness(p: Tensor, budget: float) -> Tensor:
    """How far images are opened to correction `(images,)`, from 0 to 1, by their p-values.

    1 up to p = `budget`, 0 from `RAMP` times that, linear in log p between.

    >>> openness(torch.tensor([0.0, 0.02, 0.1, 0.4, 1.0], dtype=torch.float64), 0.02)
    tensor([1.0000, 1.0000, 0.4628, 0.0000, 0.0000], dtype=torch.float64)
    """
    opened = torch.log(RAMP * budget / p.clamp(min=1e-30)) / math.log(RAMP)
    return torch.where(p < RAMP * budget, opened.clamp(0, 1), 0.0)


def features(moments: Tensor, floor: Tensor) -> Tensor:
    """What the gate looks at `(batch, 2 or 4 times channels)`, from `channels.moments` `(batch, 2 or 5, channels)`.

    The mean and the logarithm of the deviation; with bands, the mean, the logarithm of each band's deviation, and how
    even the high band is: the logarithm of its mean absolute value over its deviation. Noise is everywhere, detail is
    at edges. `floor` `(2 or 5, channels)` is a variance of no meaning, which Gaussian noise adds to every map.
    """
    mean, moments, floor = moments[:, 0].double(), moments.double(), floor.double()

    def log_deviation(row: int) -> Tensor:
        return 0.5 * torch.log(moments[:, row] + floor[row])

    if moments.shape[1] == 2:
        return torch.cat([mean, log_deviation(1)], dim=1)
    size = 0.5 * torch.log(moments[:, 4].square() + 2 / math.pi * floor[3])
    return torch.cat([mean, log_deviation(2), log_deviation(3), size - log_deviation(3)], dim=1)


def fit(clean: Tensor, names: Tensor | None = None) -> Gate:
    """The gate of clean images' features `(images, d)`, in an order that has nothing to do with what they are like.

    Images of even rank fit it, the others are held out. A feature that is the same in all of the first says nothing.
    Where images have `names` `(images,)`, ascending, those of one name have one rank: an image that was seen twice
    must not be held out from a fit to itself.
    """
    clean = clean.double()
    rank = torch.arange(len(clean)) if names is None else torch.unique_consecutive(names, return_inverse=True)[1]
    known, held = (clean[rank.to(clean.device) % 2 == side] for side in (0, 1))
    n = len(known)
    top = torch.special.ndtri(torch.tensor(1 - 0.5 / max(n, 2), dtype=torch.float64, device=clean.device))
    levels = torch.linspace(-1, 1, KNOTS, dtype=torch.float64, device=clean.device) * top
    at = (torch.special.ndtr(levels) * n - 0.5).clamp(0, n - 1)
    ordered = known.T.contiguous().sort(dim=1).values
    knots = torch.lerp(ordered[:, at.floor().long()], ordered[:, at.ceil().long()], at.frac())
    tails = _tails(knots, levels)
    z = normal_scores(known, knots, tails, top)
    centre = z.mean(dim=0)
    varies = (knots[:, 0] < knots[:, -1]).double()
    gate = Gate(knots, tails, top, centre, _whitening(z - centre, varies), centre[:0])
    return gate._replace(held=gate.scores(held).sort().values)


def normal_scores(features: Tensor, knots: Tensor, tails: Tensor, top: Tensor) -> Tensor:
    """What a normal variable would be at the features' quantiles `(images, d)`; linear between knots and beyond them.

    Where knots are equal, it is the middle of their scores.
    """
    x = features.T.contiguous()
    step = 2 * top / (KNOTS - 1)

    def between(right: bool) -> Tensor:
        i = torch.searchsorted(knots, x, right=right).clamp(1, KNOTS - 1)
        below, above = knots.gather(1, i - 1), knots.gather(1, i)
        equal = (x >= below if right else x > below).double()
        share = torch.where(above > below, (x - below) / (above - below), equal)
        return (i - 1 + share.clamp(0, 1)) * step - top

    beyond = (x - knots[:, -1:]).clamp(min=0) / tails[0, :, None] - (knots[:, :1] - x).clamp(min=0) / tails[1, :, None]
    return ((between(right=False) + between(right=True)) / 2 + beyond).T


def shrinkage(z: Tensor) -> Tensor:
    """How far the covariance of `z` `(images, d)`, of mean 0, should go to its diagonal: a share `()`.

    The one of least expected square error (Ledoit and Wolf 2003; Schäfer and Strimmer 2005, target D): what is not on
    the diagonal is shrunk by how uncertain it is, all together.

    >>> z = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> bool(shrinkage(z) > 0.5), bool(shrinkage(z[:, :1] + 0.1 * z) < 0.1)
    (True, True)
    """
    n = len(z)
    covariance, square = z.T @ z / n, z.square()
    uncertain = (square.T @ square / n - covariance.square()) / n
    total, doubt = (m.sum() - m.diag().sum() for m in (covariance.square(), uncertain))
    # Never quite 0: features that repeat one another would be divided by nothing.
    return torch.where(total > 0, doubt / total, 1.0).clamp(1e-3, 1)


def _whitening(z: Tensor, varies: Tensor) -> Tensor:
    """What makes `z` `(images, d)`, of mean 0, uncorrelated and of variance 1 `(d, d)`; 0 where it never `varies`."""
    covariance = z.T @ z / len(z)
    variance = covariance.diag().diag()
    root = torch.linalg.cholesky(torch.lerp(covariance, variance, shrinkage(z)) + (1 - varies).diag())
    identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
    inverse: Tensor = torch.linalg.solve_triangular(root, identity, upper=False)
    return inverse.T * varies[:, None]


def _tails(knots: Tensor, levels: Tensor) -> Tensor:
    """How much of each feature is one step of the score beyond its `knots` `(d, KNOTS)`: `(2, d)`.

    Where half the clean images are equal, it is that of the whole range; where all are, any will do.
    """
    k = min(int((torch.special.ndtr(levels) < TAIL).sum()), KNOTS - 1)
    middle = knots[:, KNOTS // 2]
    tails = torch.stack([knots[:, k] - middle, middle - knots[:, -1 - k]]) / levels[k]
    tails = torch.where(tails > 0, tails, (knots[:, -1] - knots[:, 0]) / (2 * levels[-1]))
    return torch.where(tails > 0, tails, torch.inf)
