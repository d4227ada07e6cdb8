"""`measure`: how far the activations of single images are from those of clean ones, site by site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from trueup import functional
from trueup.graph import Options
from trueup.probe import Probe
from trueup.targets import Targets


@dataclass(frozen=True, eq=False)
class Shift:
    """How far images have shifted from clean data, one row an image, one column a site.

    `distance` is the 1-Wasserstein distance between the image's activations and the site's target, location
    included. `unusual` is the share of clean images that lay closer: 0.5 is ordinary, 1 is farther than any.
    """

    sites: tuple[str, ...]
    distance: Tensor  # (images, sites) float32
    unusual: Tensor  # (images, sites) float32, 0 to 1

    def __str__(self) -> str:
        width = max(len(name) for name in self.sites)
        lines = [f"{'site':{width}}  distance  unusual   (means over {len(self.distance)} images)"]
        for name, distance, unusual in zip(self.sites, self.distance.T, self.unusual.T, strict=True):
            lines.append(f"{name:{width}}  {distance.mean():8.4f}  {unusual.mean():7.3f}")
        return "\n".join(lines)


def measure(model: nn.Module, targets: Targets, images: Tensor, **options: Unpack[Options]) -> Shift:
    """Compare each image's activations with the targets, at every site, in one forward pass of the uncorrected model.

    An image that holds NaN or infinity has a distance of NaN or infinity where that has spread to, and counts as
    entirely unusual.
    """
    probe = Probe(model, **options)
    targets.check_model(probe.model, probe.module.sites, selected=options.get("select") is not None)

    def look(name: str, a: Tensor) -> tuple[Tensor, Tensor] | None:
        if name not in targets:
            return None
        ordered = functional.as_rows(a).sort(dim=1).values
        target = targets[name].order_statistics(ordered.shape[1])
        distance = functional.wasserstein(ordered, target.to(ordered))
        return distance.float().cpu(), targets[name].unusual(ordered)

    seen = {name: pair for name, pair in probe(images, look).items() if pair is not None}
    distances, unusual = zip(*seen.values(), strict=True)
    return Shift(tuple(seen), torch.stack(distances, dim=1), torch.stack(unusual, dim=1))
