"""PEA, progressive embedding alignment, without its moving average: every image is aligned on its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup_lab.evaluation.methods.after_norms import after_norms, norm_outputs
from trueup_lab.evaluation.methods.protocol import Needs, Network, require

GROUP = 64
"""Channels that are aligned together."""

RIDGE = 1e-5
"""Added to covariances, relative to their mean variance: one image's map may have fewer pixels than channels."""


@dataclass(frozen=True)
class LayerMoments:
    """Mean `(C,)` of a layer's pixels over clean images, and covariances `(c, c)` of groups of channels, float64."""

    mean: Tensor
    covariances: tuple[Tensor, ...]

    @property
    def variance(self) -> Tensor:
        """Variance of each channel, `(C,)`."""
        return torch.cat([covariance.diagonal() for covariance in self.covariances])


@dataclass(frozen=True)
class Pea:
    """F <- F + w (Y - F), with Y = (F - mu_t) Sigma_t^(-1/2) Sigma_s^(1/2) + mu_s (Xiao et al., 2026).

    s are clean images, t is the test image; F is a norm's output. A first pass measures the layers' distances
    d = mean over channels of |mu_s - mu_t| + |var_s - var_t|; w is d scaled to [0, 1] over the layers. The authors
    average mu_t and Sigma_t over test batches; this version has no state.
    """

    kind = "pea"
    needs = Needs(targets=True)

    @property
    def name(self) -> str:
        """`pea`."""
        return self.kind

    @torch.inference_mode()
    def calibrate(self, model: nn.Module, batches: Iterable[Tensor]) -> dict[str, LayerMoments]:
        """Return the moments of each norm layer's output by its name."""
        counts: dict[str, int] = {}
        totals: dict[str, Tensor] = {}
        products: dict[str, list[Tensor]] = {}

        def add(name: str, output: Tensor) -> None:
            pixels = output.transpose(0, 1).flatten(1).double()  # (C, batch * pixels)
            new = [group @ group.T for group in torch.split(pixels, GROUP)]
            counts[name] = counts.get(name, 0) + pixels.shape[1]
            totals[name] = totals.get(name, 0) + pixels.sum(1)
            products[name] = [a + b for a, b in zip(products[name], new, strict=True)] if name in products else new

        for batch in batches:
            norm_outputs(model, batch, add)
        moments = {}
        for name, count in counts.items():
            mean = totals[name] / count
            pairs = zip(products[name], torch.split(mean, GROUP), strict=True)
            moments[name] = LayerMoments(mean, tuple(product / count - torch.outer(m, m) for product, m in pairs))
        return moments

    def prepare(self, model: nn.Module, targets: dict[str, LayerMoments] | None) -> Network:
        """Return a function that runs the model twice: to weigh the layers, and to align them."""
        known = require(self.name, targets)
        weights: dict[str, Tensor] = {}
        aligned = after_norms(model, lambda name: _Align(name, known[name], weights))

        def network(x: Tensor) -> Tensor:
            distances: dict[str, Tensor] = {}

            def see(name: str, output: Tensor) -> None:
                var, mean = torch.var_mean(output.flatten(2).double(), dim=2, correction=0)
                source = known[name]
                distances[name] = ((source.mean - mean).abs() + (source.variance - var).abs()).mean(dim=1)

            norm_outputs(model, x, see)
            weights.update(zip(distances, layer_weights(torch.stack([*distances.values()])), strict=True))
            logits: Tensor = aligned(x)
            weights.clear()
            return logits

        return network


def layer_weights(distances: Tensor) -> Tensor:
    """Scale distances `(layers, batch)` to [0, 1] over the layers of each image.

    >>> layer_weights(torch.tensor([[1.0], [2.0], [5.0]])).flatten()
    tensor([0.0000, 0.2500, 1.0000])
    """
    low, high = distances.amin(0), distances.amax(0)
    return (distances - low) / (high - low).clamp(min=torch.finfo(distances.dtype).tiny)


class _Align(nn.Module):
    def __init__(self, name: str, source: LayerMoments, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.name, self.source, self.weights = name, source, weights
        self.colour = [power(covariance, 0.5) for covariance in source.covariances]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).double()  # (batch, C, pixels)
        pixels = rows.shape[2]
        if pixels == 1:  # one pixel has no covariance
            return x
        centred = rows - rows.mean(dim=2, keepdim=True)
        parts = []
        for group, colour in zip(torch.split(centred, GROUP, dim=1), self.colour, strict=True):
            whiten = power(group @ group.mT / pixels, -0.5)
            parts.append(colour @ whiten @ group)
        goal = torch.cat(parts, dim=1) + self.source.mean[:, None]
        moved = torch.lerp(rows, goal, self.weights[self.name][:, None, None])
        return moved.view(x.shape).type_as(x)


def power(covariance: Tensor, exponent: float) -> Tensor:
    """Return the power of covariances `(..., c, c)`, after the ridge."""
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    ridge = RIDGE * values.mean(dim=-1, keepdim=True)
    powers = (values + ridge).clamp(min=1e-12).pow(exponent)
    result: Tensor = vectors * powers[..., None, :] @ vectors.mT
    return result
