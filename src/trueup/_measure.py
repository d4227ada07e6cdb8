"""`measure`: how far the activations of single images are from those of clean ones, site by site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack, get_args

import torch
from torch import Tensor, nn

from trueup import functional
from trueup.graph.activations import Kind
from trueup.graph import Options, Site
from trueup.graph.probe import Probe
from trueup.targets import Targets


@dataclass(frozen=True, eq=False)
class Shift:
    """How far images have shifted from clean data, one row an image, one column a site.

    After activation functions: `distance` is the 1-Wasserstein distance between the image's activations and the
    site's target, location included. `unusual` is the share of clean images that lay closer: 0.5 is ordinary, 1 is
    farther than any.

    After norms: `evidence` is the mean over channels of the squared distance of their statistics from what is usual,
    in spreads, 1 on clean images; `surprise` is its rank among clean images that were kept.

    `image` is one number an image, the one by which `Evidence` decides, but that it looks at maps whose early norms are
    corrected, unless `least=0`: 1 - p, with p the share of held-out clean images that are as unusual at the end of the
    first stage (`trueup.functional.gate`). NaN where the targets hold nothing for it.
    Both are calibrated: of clean images that were not seen, about 1 % lie above 0.99.
    """

    sites: tuple[str, ...]
    distance: Tensor  # (images, sites) float32
    unusual: Tensor  # (images, sites) float32, 0 to 1
    norms: tuple[str, ...]
    evidence: Tensor  # (images, norms) float32
    surprise: Tensor  # (images, norms) float32, 0 to 1
    image: Tensor  # (images,) float32, 0 to 1

    def __str__(self) -> str:
        width = max(len(name) for name in [*self.sites, *self.norms])
        lines = [f"{'site':{width}}  distance  unusual   (means over {len(self.distance)} images)"]
        for name, distance, unusual in zip(self.sites, self.distance.T, self.unusual.T, strict=True):
            lines.append(f"{name:{width}}  {distance.mean():8.4f}  {unusual.mean():7.3f}")
        if self.norms:
            lines.append(f"{'norm':{width}}  evidence  surprise")
        for name, evidence, surprise in zip(self.norms, self.evidence.T, self.surprise.T, strict=True):
            lines.append(f"{name:{width}}  {evidence.mean():8.2f}  {surprise.mean():8.3f}")
        return "\n".join(lines)


def measure(model: nn.Module, targets: Targets, images: Tensor, **options: Unpack[Options]) -> Shift:
    """Compare each image's activations with the targets, at every site, in one forward pass of the uncorrected model.

    An image that holds NaN or infinity has a distance of NaN or infinity where that has spread to, and counts as
    entirely unusual.
    """
    probe = Probe(model, kinds=get_args(Kind), **options)
    wanted = [*targets.sites, *targets.channels]
    targets.check_model(probe.model)
    targets.check_sites(probe.model, wanted, probe.selected, selected=options.get("select") is not None)
    looked: dict[str, Tensor] = {}

    def look(site: Site, a: Tensor) -> tuple[Tensor, Tensor] | Tensor | None:
        if site.name in targets.gate:
            looked[site.name] = targets.gate[site.name].features(a.movedim(site.channels, 1)).cpu()
        if site.name not in probe.selected:
            return None
        if site.name in targets.channels:
            return targets.channels[site.name].evidence(a.movedim(site.channels, 1))
        if site.name not in targets:
            return None
        ordered = functional.as_rows(a).sort(dim=1).values
        target = targets[site.name].order_statistics(ordered.shape[1])
        distance = functional.wasserstein(ordered, target.to(ordered))
        return distance.float().cpu(), targets[site.name].unusual(ordered)

    seen = probe(images, look)
    pairs = {name: pair for name, pair in seen.items() if isinstance(pair, tuple)}
    scores = {name: score for name, score in seen.items() if isinstance(score, Tensor)}
    evidence = _columns(list(scores.values()), len(images))
    clean = _columns([targets.channels[name].clean_evidence() for name in scores], len(targets.sampled))
    return Shift(
        sites=tuple(pairs),
        distance=_columns([distance for distance, _ in pairs.values()], len(images)).float(),
        unusual=_columns([unusual for _, unusual in pairs.values()], len(images)).float(),
        norms=tuple(scores),
        evidence=evidence.float(),
        surprise=_columns([_rank(*pair) for pair in zip(evidence.T, clean.T, strict=True)], len(images)).float(),
        image=_image(targets, looked, len(images)).float(),
    )


def _image(targets: Targets, looked: dict[str, Tensor], images: int) -> Tensor:
    """How unusual whole images are `(images,)`, from the features at the norms that the gate reads."""
    if not targets.gate:
        return torch.full((images,), torch.nan)
    return 1 - targets.fitted_gate.p_values(torch.cat([looked[name] for name in targets.gate], dim=1))


def _rank(scores: Tensor, clean: Tensor) -> Tensor:
    """The share of clean images, and the image itself, whose score is lower `(images,)`; 1 for what is not finite.

    An image that is drawn as the clean ones were is as likely to take any of the n + 1 places among them.
    """
    below = torch.searchsorted(clean.sort().values, scores.contiguous()) / (len(clean) + 1)
    return torch.where(scores.isfinite(), below, 1.0)


def _columns(columns: list[Tensor], rows: int) -> Tensor:
    return torch.stack(columns, dim=1) if columns else torch.zeros(rows, 0)
