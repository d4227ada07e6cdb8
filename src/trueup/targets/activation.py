"""Target of one activation site: the distribution of its values on clean images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueup import functional
from trueup.plurals import counted

SKETCH = 65  # quantile levels kept per sampled image


@dataclass(frozen=True, eq=False)
class ActivationTarget:
    """Activations of one site on clean images: the target distribution, and how much images differ from it.

    Sums over images, so adding two is merging them. `levels` are the quantile levels at which the sums are known, or
    None if every order statistic is kept.
    """

    shape: tuple[int, ...]  # of one image's activations
    levels: Tensor | None  # (m,) float64
    total: Tensor  # (m,) float64: sum of the images' quantile functions
    square: Tensor  # (m,) float64: sum of their squares
    loss: float  # sum of the Wasserstein distances between each image's activations and what the levels keep of them
    images: int
    sample: Tensor  # (sampled images, SKETCH) float32: quantile functions of the first images of Targets.sampled

    def __post_init__(self) -> None:
        known = self.total if self.levels is None else self.levels
        shapes = [tuple(t.shape) for t in (self.total, self.square, known, self.sample)]
        if len({*shapes[:3]}) != 1 or len(shapes[0]) != 1 or shapes[3][1:] != (SKETCH,):
            raise ValueError(f"the tensors of an activation target do not fit together: shapes {shapes}")

    def __repr__(self) -> str:
        return f"ActivationTarget(shape={self.shape}, {counted(self.images, 'image')}, {len(self.sample)} sampled)"

    def __add__(self, other: ActivationTarget) -> ActivationTarget:
        """Sums of both; the caller merges the samples."""
        if self.total.shape != other.total.shape or (self.levels is None) != (other.levels is None):
            raise ValueError(
                f"calibrated at two resolutions ({len(self.total)} and {len(other.total)} values); with "
                "resolution=None, all images must have one size"
            )
        return ActivationTarget(
            shape=self.shape,
            levels=self.levels,
            total=self.total + other.total,
            square=self.square + other.square,
            loss=self.loss + other.loss,
            images=self.images + other.images,
            sample=self.sample,
        )

    @property
    def target(self) -> Tensor:
        """Barycenter at `levels` `(m,)`: the mean of each order statistic, t₍ᵢ₎ before centring."""
        return self.total / self.images

    @property
    def spread(self) -> Tensor:
        """Standard deviation of each order statistic over images `(m,)`: the appendix's σ₍ᵢ₎."""
        return (self.square / self.images - self.target**2).clamp(min=0).sqrt()

    @property
    def compression_error(self) -> float:
        """Mean over images of the 1-Wasserstein distance between an image's activations and their stored form.

        Averaging over images is linear, so the error of `target` is at most this if the quantiles were sorted. If they
        were read from histograms, this is an estimate halfway between levels, and too low.
        """
        return self.loss / self.images

    def order_statistics(self, n: int) -> Tensor:
        """The target for rows of `n` activations `(n,)`, float64."""
        return functional.order_statistics(self.target, n, levels=self.levels)

    def distance(self, ordered: Tensor) -> Tensor:
        """Distance of each row of sorted activations from the target, by their sketches `(batch,)` float32."""
        return self._distance(sketch(ordered).float().cpu())

    def clean_distance(self) -> Tensor:
        """Distance of each sampled clean image from the target `(sampled images,)` float32."""
        return self._distance(self.sample)

    def _distance(self, sketches: Tensor) -> Tensor:
        levels = functional.levels(SKETCH, device=self.target.device)
        target = functional.quantile(self.target, levels, levels=self.levels).float()
        return torch.trapezoid((sketches - target).abs(), levels.float(), dim=1)


def sketch(ordered: Tensor) -> Tensor:
    """Short quantile function of sorted activations `(batch, n)`: `(batch, SKETCH)`."""
    return functional.quantile(ordered, functional.levels(SKETCH, device=ordered.device))
