"""The numbers behind the paper's pictures of activations; `trueup_lab.figures.activations` draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import trueup
from trueup import Targets, functional
from trueup.graph import Probe, trace


@dataclass(frozen=True)
class Maps:
    """Activation maps of one image, averaged over channels: one per site, uncorrected and corrected."""

    image: Tensor  # (C, H, W), as the model takes it
    plain: tuple[Tensor, ...]  # (h, w) each
    corrected: tuple[Tensor, ...]


def activation_maps(
    model: nn.Module, targets: Targets, correction: trueup.Correction, image: Tensor, *, layers: int = 5
) -> Maps:
    """Return the maps of one `image` `(C, H, W)` at the first `layers` activation sites: the paper's Figure 1."""
    probe = Probe(trace(model, own_buffers=True), lambda site: site.kind == "activation")
    plain = probe(image[None], lambda _, a: a[0].mean(dim=0).cpu())
    after = [pair[1][0].mean(dim=0).cpu() for pair in site_by_site(model, targets, correction, image[None])]
    return Maps(image.cpu(), tuple(plain.values())[:layers], tuple(after[:layers]))


@dataclass(frozen=True)
class BeforeAfter:
    """Activations of one image at the first site, before and after correction, and the target."""

    before: Tensor  # (channels, n)
    after: Tensor  # (channels, n)
    target: Tensor  # (channels * n,) ascending


def before_and_after(model: nn.Module, targets: Targets, correction: trueup.Correction, image: Tensor) -> BeforeAfter:
    """Return the activations of one `image` `(C, H, W)` at the first site: the paper's Figure 2."""
    before, after = site_by_site(model, targets, correction, image[None])[0]
    target = next(iter(targets.activations.values())).order_statistics(before[0].numel())
    return BeforeAfter(before[0].flatten(1).cpu(), after[0].flatten(1).cpu(), target.float())


@torch.inference_mode()
def site_by_site(
    model: nn.Module, targets: Targets, correction: trueup.Correction, images: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return the activations before and after the correction of each site, in the order of the forward pass."""
    # Sorting fuses nothing, so a placed module is given the activation and not the activation function's input.
    robust = trueup.correct(model, targets, replace(correction, method="sort"))
    seen: list[tuple[Tensor, Tensor]] = []
    for module in robust.placed:
        module.register_forward_hook(lambda _module, given, out: seen.append((given[0].clone(), out)))
    robust(images)
    return seen


@dataclass(frozen=True)
class Stationarity:
    """Mean t and standard deviation σ over images of each order statistic of a layer: the paper's Figure 7."""

    mean: Tensor  # (n,) ascending
    spread: Tensor  # (n,)

    def log_density(self, deviation: Tensor) -> Tensor:
        """Return log p(t + deviation) `(deviations, n)` for normal distributions with mean t and deviation σ."""
        sigma = self.spread.clamp(min=1e-6)
        return -0.5 * (deviation[:, None] / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)


@torch.inference_mode()
def stationarity(model: nn.Module, layer: str, batches: Iterable[Tensor]) -> Stationarity:
    """Measure the order statistics of the output of `layer`, before its activation function, over all images."""
    total, square, count = None, None, 0
    for images in batches:
        ordered = functional.as_rows(output_of(model, layer, images)).double().sort(dim=1).values
        total = ordered.sum(0) + (0 if total is None else total)
        square = (ordered**2).sum(0) + (0 if square is None else square)
        count += len(images)
    if total is None or square is None:
        raise ValueError("stationarity: batches is empty; give at least one batch of images")
    mean = total / count
    return Stationarity(mean.cpu(), (square / count - mean**2).clamp(min=0).sqrt().cpu())


@dataclass(frozen=True)
class Dissimilar:
    """The image farthest from another by the distributions of its channels: the paper's Figure 8."""

    first: int
    farthest: int
    distance: Tensor  # (images,): from the first image to each
    channels: tuple[Tensor, Tensor]  # sorted values of both images, (channels, n) each


@torch.inference_mode()
def most_dissimilar(model: nn.Module, layer: str, batches: Iterable[Tensor], *, first: int = 0) -> Dissimilar:
    """Find the image whose channels' sorted values at `layer` differ most, in sum, from those of image `first`."""
    kept = [output_of(model, layer, images).flatten(2).float().sort(dim=2).values for images in batches]
    ordered = torch.cat(kept)
    parts = [(part - ordered[first]).abs().sum(dim=(1, 2)) for part in torch.split(ordered, 500)]
    distance = torch.cat(parts)
    farthest = int(distance.argmax())
    return Dissimilar(first, farthest, distance.cpu(), (ordered[first].cpu(), ordered[farthest].cpu()))


def output_of(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """Return the output of the module called `layer` for `images`."""
    seen: list[Tensor] = []
    hook = model.get_submodule(layer).register_forward_hook(lambda _module, _given, out: seen.append(out))
    try:
        model(images)
    finally:
        hook.remove()
    return seen[0]
