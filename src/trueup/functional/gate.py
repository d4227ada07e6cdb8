"""The mathematics of the gate: how unusual a whole image is, and how much of the correction it gets.

All in float64. An image's *features* `(images, d)` describe its channels at a few norms. A `Gate` is fitted to the
features of clean images: quantiles turn each feature into a normal score, and a whitened squared distance combines the
scores, so that features that repeat each other count once. Half of the clean images fit the gate. The other half ranks:
an image's p-value is the share of held-out images that are at least as far away, made continuous. Of new clean images,
at most a share α has a p-value of α or less. Its thresholds are fields of `trueup.rules.Evidence`: `budget`, `ramp`.

>>> clean = torch.randn(400, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
>>> gate = fit(clean)
>>> p = gate.p_values(torch.tensor([[0.1, 0.2, -0.3], [9.0, 9.0, 9.0]], dtype=torch.float64))
>>> gate_values(p, budget=0.02, ramp=20)
tensor([0., 1.], dtype=torch.float64)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Gate", "features", "fit", "gate_values", "normal_scores", "shrinkage"]

KNOTS = 65  # quantiles kept per feature
MANY, SPACING = 8, 1e-4  # so many equal knots are spread, by this share of the feature's range from one to the next
TAIL = 0.98  # beyond the last knot, scores go on with the slope between the median and this quantile


class Gate(NamedTuple):
    """Distribution of clean images' features, made by `fit`."""

    knots: Tensor  # (d, KNOTS): quantiles of each feature, at even steps of the normal score
    tails: Tensor  # (2, d): feature change per unit of score, above the last knot and below the first
    top: Tensor  # (): score at the last knot; the first knot has the opposite score
    centre: Tensor  # (d,): mean of the scores
    whiten: Tensor  # (d, d): matrix that makes the scores uncorrelated with variance 1
    held: Tensor  # (n,): `scores` of the held-out clean images, ascending

    def scores(self, features: Tensor) -> Tensor:
        """Distance of images from clean ones `(images,)`: the mean square of their whitened normal scores."""
        return (
            ((normal_scores(features, self.knots, self.tails, self.top) - self.centre) @ self.whiten).square().mean(1)
        )

    def p_values(self, features: Tensor) -> Tensor:
        """p-value per image `(images,)`: the share of held-out images, plus this one, that are at least as far away.

        The share itself falls in steps, and the rounding of another batch size could decide between two of them. So
        p is interpolated linearly between held-out scores, never below the share. The smallest p of a finite image is
        1 / (n + 1), from twice the largest held-out score on; an image that is not finite has p = 0.
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


def gate_values(p: Tensor, budget: float, ramp: float) -> Tensor:
    """Gate value per image `(images,)`, 0 (leave alone) to 1 (correct fully), from the p-values.

    1 up to p = `budget`, 0 from `ramp` times that, linear in log p between.

    >>> gate_values(torch.tensor([0.0, 0.02, 0.1, 0.4, 1.0], dtype=torch.float64), 0.02, 20)
    tensor([1.0000, 1.0000, 0.4628, 0.0000, 0.0000], dtype=torch.float64)
    """
    opened = torch.log(ramp * budget / p.clamp(min=1e-30)) / math.log(ramp)
    return torch.where(p < ramp * budget, opened.clamp(0, 1), 0.0)


def features(moments: Tensor, floor: Tensor) -> Tensor:
    """Features that the gate reads `(batch, d)`, from `evidence.moments` `(batch, 2 or 5, channels)`.

    d is 2 or 4 times the channels.

    Without bands: the mean and the log-deviation. With bands: the mean, the log-deviation of each band, and how evenly
    the high band is spread, as the logarithm of its mean absolute value over its deviation: noise is everywhere, detail
    is at edges. `floor` `(2 or 5, channels)` is a variance too small to mean anything, as if every map had that much
    Gaussian noise.
    """
    mean, moments, floor = moments[:, 0].double(), moments.double(), floor.double()

    def log_deviation(row: int) -> Tensor:
        return 0.5 * torch.log(moments[:, row] + floor[row])

    if moments.shape[1] == 2:
        return torch.cat([mean, log_deviation(1)], dim=1)
    size = 0.5 * torch.log(moments[:, 4].square() + 2 / math.pi * floor[3])
    return torch.cat([mean, log_deviation(2), log_deviation(3), size - log_deviation(3)], dim=1)


def fit(clean: Tensor, hashes: Tensor | None = None) -> Gate:
    """Fit a gate to clean images' features `(images, d)`, whose order must not depend on their content.

    Images of even rank fit the gate, the others are held out. A feature that is constant in the first half is ignored.
    Where many images have exactly the same value of a feature, as of a dead channel, many knots are equal. They are
    spread around it over a small width, because the score must not jump there: devices and layouts round differently.
    Images with equal `hashes` `(images,)`, ascending, share a rank: an image that was seen twice must not be held out
    from a fit to itself.
    """
    clean = clean.double()
    order = torch.arange(len(clean), device=clean.device)
    rank = order if hashes is None else torch.unique_consecutive(hashes, return_inverse=True)[1]
    known, held = (clean[rank.to(clean.device) % 2 == side] for side in (0, 1))
    n = len(known)
    top = torch.special.ndtri(torch.tensor(1 - 0.5 / max(n, 2), dtype=torch.float64, device=clean.device))
    levels = torch.linspace(-1, 1, KNOTS, dtype=torch.float64, device=clean.device) * top
    at = (torch.special.ndtr(levels) * n - 0.5).clamp(0, n - 1)
    ordered = known.T.contiguous().sort(dim=1).values
    knots = torch.lerp(ordered[:, at.floor().long()], ordered[:, at.ceil().long()], at.frac())
    tails = _tails(knots, levels)
    varies = (knots[:, 0] < knots[:, -1]).double()
    knots = _spread(knots)
    z = normal_scores(known, knots, tails, top)
    centre = z.mean(dim=0)
    gate = Gate(knots, tails, top, centre, _whitening(z - centre, varies), centre[:0])
    return gate._replace(held=gate.scores(held).sort().values)


def normal_scores(features: Tensor, knots: Tensor, tails: Tensor, top: Tensor) -> Tensor:
    """Normal scores of the features' quantiles `(images, d)`, linear between knots and beyond them.

    Equal knots give the middle of their scores.
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
    """Share `()` by which the covariance of the zero-mean `z` `(images, d)` should be shrunk towards its diagonal.

    It minimises the expected squared error (Ledoit and Wolf 2003; Schäfer and Strimmer 2005, target D).

    >>> z = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> bool(shrinkage(z) > 0.5), bool(shrinkage(z[:, :1] + 0.1 * z) < 0.1)
    (True, True)
    """
    n = len(z)
    covariance, square = z.T @ z / n, z.square()
    uncertain = (square.T @ square / n - covariance.square()) / n
    total, doubt = (m.sum() - m.diag().sum() for m in (covariance.square(), uncertain))
    # Never 0: features that repeat each other would make the covariance singular.
    return torch.where(total > 0, doubt / total, 1.0).clamp(1e-3, 1)


def _spread(knots: Tensor) -> Tensor:
    """The ascending `knots` `(d, KNOTS)`, with `MANY` or more equal ones spread evenly around their value.

    They lie `SPACING` apart, as many below the value as above it, so it still gets the middle of their scores.
    """
    first, after = torch.searchsorted(knots, knots), torch.searchsorted(knots, knots, right=True)
    place = torch.arange(KNOTS, device=knots.device) - (first + after - 1) / 2
    moved = knots + SPACING * (knots[:, -1:] - knots[:, :1]) * place
    return torch.where(after - first >= MANY, moved, knots).sort(dim=1).values  # others may lie among them


def _whitening(z: Tensor, varies: Tensor) -> Tensor:
    """Matrix `(d, d)` that whitens the zero-mean `z` `(images, d)`; 0 for features that never vary."""
    covariance = z.T @ z / len(z)
    variance = covariance.diag().diag()
    root = torch.linalg.cholesky(torch.lerp(covariance, variance, shrinkage(z)) + (1 - varies).diag())
    identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
    inverse: Tensor = torch.linalg.solve_triangular(root, identity, upper=False)
    return inverse.T * varies[:, None]


def _tails(knots: Tensor, levels: Tensor) -> Tensor:
    """Feature change per unit of score beyond the `knots` `(d, KNOTS)`: `(2, d)`.

    If half of the clean images are equal, it is the slope of the whole range; if all are, any slope will do.
    """
    k = min(int((torch.special.ndtr(levels) < TAIL).sum()), KNOTS - 1)
    middle = knots[:, KNOTS // 2]
    tails = torch.stack([knots[:, k] - middle, middle - knots[:, -1 - k]]) / levels[k]
    tails = torch.where(tails > 0, tails, (knots[:, -1] - knots[:, 0]) / (2 * levels[-1]))
    return torch.where(tails > 0, tails, torch.inf)
