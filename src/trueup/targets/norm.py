"""Target of one norm site: the statistics of its channels on clean images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueup import kernels
from trueup.functional import evidence, gate
from trueup.plurals import counted
from trueup.rules import Evidence
from trueup.rules.evidence import NUISANCE_FLOOR

FLOOR = Evidence.floor


@dataclass(frozen=True, eq=False)
class NormTarget:
    """Output of one norm on clean images: the usual mean and deviations of each channel's map.

    One row per moment, as in `functional.evidence.moments`: mean and variance and, if maps are large enough for bands,
    the variances of both bands; the gate also keeps the high band's mean absolute value. Sums over all images and the
    moments of sampled images, so adding two is merging them. The floor of the logarithms depends on all images. So
    logarithms are taken only when a rule is applied, and the result does not depend on how the data was split.
    """

    shape: tuple[int, ...]  # of one image's activations, channels first
    total: Tensor  # (k, channels) float64, k = 2, 4 or 5: sum of the images' moments
    images: int
    sample: Tensor  # (sampled images, k, channels) float16: moments with deviations in place of variances
    drift: Tensor | None = None  # (2 or 4, channels) float64: summed squared drift of each statistic under perturbation
    drifted: int = 0  # perturbed images that were summed
    weights: Tensor | None = None  # (2 or 3, channels) float32: learned weight of each statistic's evidence
    # In small files: centre, spread and κ of one rule, computed before most images were dropped (3, 2 or 3, channels)
    settled: Tensor | None = None
    settled_for: Evidence | None = None

    def __post_init__(self) -> None:
        fit = self.total.dim() == 2 and self.total.shape == self.sample.shape[1:]
        if not fit or len(self.total) not in (2, 4, 5) or self.shape[:1] != self.total.shape[1:]:
            shapes = [tuple(t.shape) for t in (self.total, self.sample)]
            raise ValueError(f"the tensors of a norm target of shape {self.shape} do not fit together: shapes {shapes}")
        if self.weights is not None and self.weights.shape != (len(self._rows(bands=True)), *self.shape[:1]):
            raise ValueError(f"the learned weights of a norm target have shape {tuple(self.weights.shape)}")
        if self.settled is not None and self.settled.shape not in [(3, k, *self.shape[:1]) for k in (2, 3)]:
            raise ValueError(f"the settled statistics of a norm target have shape {tuple(self.settled.shape)}")

    def __repr__(self) -> str:
        return f"NormTarget(shape={self.shape}, {counted(self.images, 'image')}, {len(self.sample)} sampled)"

    def __add__(self, other: NormTarget) -> NormTarget:
        """Sums of both; the caller merges the samples. Bands stay only if the maps of all images had them.

        Learned weights are averaged, as logarithms, by the number of images. Those for bands do not fit without them.
        """
        rows = min(len(self.total), len(other.total))
        bands = self.bands and other.bands
        weights = [(target.weights, target.images) for target in (self, other) if target.bands == bands]
        drifts = [target.drift for target in (self, other) if target.drift is not None]
        return NormTarget(
            shape=self.shape,
            total=self.total[:rows] + other.total[:rows],
            images=self.images + other.images,
            sample=self.sample[:, :rows],
            drift=sum((drift[:rows] for drift in drifts[1:]), drifts[0][:rows]) if drifts else None,
            drifted=self.drifted + other.drifted,
            weights=mean_weights(weights),
        )

    @property
    def bands(self) -> bool:
        """Whether the deviations of both bands are known."""
        return len(self.total) > 2

    def reference(self, rule: Evidence) -> Tensor:
        """Reference of a rule `(5, 2, channels)`, or `(5, 3, channels)` with bands, float64.

        See `functional.evidence`.
        """
        rows = self._rows(bands=rule.bands)
        floor = self._floor(rows, rule.floor)
        if self.settled is not None and rule == self.settled_for:
            always = self.settled[1].isfinite().double() * rule.base
            return torch.cat([self.settled, torch.stack([floor, always])])
        clean = self._statistics(rows, floor)
        shares = None
        if rule.tuned:
            if self.weights is None:
                raise ValueError(
                    f"{rule} needs learned weights, and these targets hold none; calibrate again with "
                    "trueup.calibrate(model, loader) on more images, or use nuisance=True"
                )
            shares = self.weights.double()
        elif rule.nuisance:
            shares = self.nuisance_shares(rule)
        return evidence.reference_of(
            clean, floor, strength=rule.strength, base=rule.base, counts=rule.counts, shares=shares
        )

    def nuisance_shares(self, rule: Evidence) -> Tensor:
        """Weight of each statistic's evidence by its drift under perturbation `(2 or 3, channels)`."""
        if self.drift is None:
            raise ValueError(
                f"{rule} needs to know how statistics drift under perturbation, and these targets do not hold it; "
                "calibrate again with trueup.calibrate(model, loader)"
            )
        rows = self._rows(bands=rule.bands)
        clean = self._statistics(rows, self._floor(rows, NUISANCE_FLOOR))
        return evidence.nuisance_share(self.drift[rows] / self.drifted, clean.var(dim=0, correction=0))

    def drifting(self, a: Tensor) -> Tensor:
        """Statistics `(batch, 2 or 4, channels)` of activations `(batch, channels, ...)` whose drift is measured."""
        moments = kernels.moments(a, bands=self.bands)[:, :4].double()
        floor = self._floor(list(range(moments.shape[1])), NUISANCE_FLOOR)
        return evidence.statistics(moments, floor.to(a.device))

    def to(self, device: torch.device | None) -> NormTarget:
        """Copy of the target on another device."""
        drift, weights, settled = (
            None if part is None else part.to(device) for part in (self.drift, self.weights, self.settled)
        )
        total, sample = self.total.to(device), self.sample.to(device)
        return replace(self, total=total, sample=sample, drift=drift, weights=weights, settled=settled)

    def settle(self, rule: Evidence) -> NormTarget:
        """Store what `rule` needs, computed from all sampled images, so that most of them can be dropped.

        A norm without learned weights stays as it is if the rule is tuned: that rule does not correct it.
        """
        if rule.tuned and self.weights is None:
            return self
        return replace(self, settled=self.reference(rule)[:3], settled_for=rule)

    def fault_of_settled(self) -> str | None:
        """Describe what is wrong with the settled statistics; None if they are valid.

        Only a statistic that is the same in all images has an infinite spread, and only a rule without strength an
        infinite κ.
        """
        if self.settled is None or self.settled_for is None:
            return None
        rows = self._rows(bands=self.settled_for.bands)
        if self.settled.dtype != torch.float64 or self.settled.isnan().any() or len(rows) != self.settled.shape[1]:
            return f"{self.settled.dtype} of shape {tuple(self.settled.shape)}, or NaN"
        centre, spread, kappa = self.settled
        if not ((spread > 0).all() and (kappa > 0).all()):  # only a centre may be negative
            return "a spread or κ that is not positive"
        varies = (self.sample[:, rows] != self.sample[:1, rows]).any(dim=0)
        infinite = [centre.isinf(), spread.isinf() & varies, kappa.isinf() & (self.settled_for.strength > 0)]
        return "infinite values" if torch.stack(infinite).any() else None

    def mean_evidence(self, a: Tensor) -> Tensor:
        """Mean evidence over an image's channels and statistics `(batch,)`, float64; about 1 for clean images."""
        rows = self._rows(bands=True)
        usual, floor = self.usual()
        moments = kernels.moments(a, bands=self.bands)[:, rows].double().cpu()
        return evidence.z_squared(evidence.statistics(moments, floor), usual).mean(dim=(1, 2))

    def usual(self) -> tuple[Tensor, Tensor]:
        """Centre and spread of clean statistics `(2, 2 or 3, channels)`, and the floor of their variances."""
        rows = self._rows(bands=True)
        floor = self._floor(rows)
        return evidence.centre_and_spread(self._statistics(rows, floor)), floor

    def clean_evidence(self) -> Tensor:
        """Mean evidence of each sampled image `(sampled images,)`, measured against the others.

        If one of n images lies z spreads (of all n) away, that is n z² / (n - 1 - z²).
        """
        usual, floor = self.usual()
        clean = self._statistics(self._rows(bands=True), floor)
        z2 = evidence.z_squared(clean, usual)
        n = len(clean)
        return (n * z2 / (n - 1 - z2).clamp(min=1e-3)).mean(dim=(1, 2))

    @property
    def floor(self) -> Tensor:
        """Floor of each variance `(k, channels)`."""
        return self._floor(list(range(len(self.total))))

    def features(self, a: Tensor) -> Tensor:
        """Features that the gate reads from activations `(batch, channels, ...)`: `(batch, d)` float64."""
        return gate.features(kernels.moments(a, bands=self.bands), self.floor.to(a.device))

    def clean_features(self) -> Tensor:
        """Features of the sampled images `(sampled images, d)`."""
        return gate.features(self.clean_moments(), self.floor)

    def clean_moments(self) -> Tensor:
        """Moments of the sampled images `(sampled images, k, channels)` float64."""
        kept = self.sample.double()
        return torch.cat([kept[:, :1], kept[:, 1:4].square(), kept[:, 4:]], dim=1)

    def _rows(self, *, bands: bool) -> list[int]:
        return [0, 2, 3] if bands and self.bands else [0, 1]

    def _floor(self, rows: list[int], share: float = FLOOR) -> Tensor:
        """Floor of the variance `(k, channels)`; arbitrary for a channel that never varies."""
        return (share * self.total[rows] / self.images).clamp(min=1e-24)

    def _statistics(self, rows: list[int], floor: Tensor) -> Tensor:
        """Statistics of the sampled images."""
        return evidence.statistics(self.clean_moments()[:, rows], floor)


def mean_weights(parts: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """Geometric mean of learned weights of one shape, each counted by its number of images; None if none are known.

    >>> mean_weights([(torch.tensor([[1.0]]), 10), (torch.tensor([[4.0]]), 10), (None, 5)])
    tensor([[2.]])
    """
    known = [(weights, images) for weights, images in parts if weights is not None]
    if not known:
        return None
    total = sum(images for _, images in known)
    return (
        torch.stack([weights.double().log() * (images / total) for weights, images in known]).sum(dim=0).exp().float()
    )


def condensed(moments: Tensor) -> Tensor:
    """Moments of single images `(batch, k, channels)` as they are kept: deviations in place of variances, float16.

    Three digits are plenty compared with the spread over images. They halve the file, which is mostly these.
    """
    limit = torch.finfo(torch.float16).max
    parts = [moments[:, :1], moments[:, 1:4].sqrt(), moments[:, 4:]]
    return torch.cat(parts, dim=1).clamp(-limit, limit).half()
