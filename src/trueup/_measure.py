"""`measure`: how far an image's activations are from clean ones, at each site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trueup import functional
from trueup._checks import check_model, check_sites, check_targets
from trueup.graph import Inputs, Probe, Site, check_select, trace
from trueup.plurals import counted
from trueup.targets import Targets


@dataclass(frozen=True, eq=False)
class Shift:
    """Shift of images from clean data: one row per image, one column per site.

        shift = trueup.measure(model, targets, images)
        drifted = images[shift.image_rank > 0.99]

    Activations: `distance` is the 1-Wasserstein distance between the image's activations and the site's target,
    location included. `activation_rank` is the share of clean images, counting the image itself, that lie closer: 0.5
    is ordinary, n / (n + 1) is farther than all n that were kept.

    Norms: `evidence` is the mean over channels and statistics of the squared distance from clean, in clean
    standard deviations; it is 1 on clean images. `norm_rank` is its rank among clean images.

    `image_rank` is one number per image: 1 - p, where p is the share of held-out clean images that look at least as
    unusual at the norms that the gate reads. The gate of `Evidence` uses the same p, except that it reads maps whose
    early norms are corrected already, unless `least=0`. NaN if the targets have no gate.

    All ranks are calibrated: of unseen clean images, about 1 % have a rank above 0.99.
    """

    activations: tuple[str, ...]
    distance: Tensor  # (images, activations) float32
    activation_rank: Tensor  # (images, activations) float32, 0 to 1
    norms: tuple[str, ...]
    evidence: Tensor  # (images, norms) float32
    norm_rank: Tensor  # (images, norms) float32, 0 to 1
    image_rank: Tensor  # (images,) float32, 0 to 1

    def __repr__(self) -> str:
        parts = (len(self.image_rank), "image"), (len(self.activations), "activation"), (len(self.norms), "norm")
        return f"Shift({', '.join(counted(*part) for part in parts)})"

    def __str__(self) -> str:
        width = max(len(name) for name in [*self.activations, *self.norms])
        lines = [f"{'activation':{width}}  distance     rank   (means over {counted(len(self.distance), 'image')})"]
        for name, distance, rank in zip(self.activations, self.distance.T, self.activation_rank.T, strict=True):
            lines.append(f"{name:{width}}  {distance.mean():8.4f}  {rank.mean():7.3f}")
        if self.norms:
            lines.append(f"{'norm':{width}}  evidence     rank")
        for name, evidence, rank in zip(self.norms, self.evidence.T, self.norm_rank.T, strict=True):
            lines.append(f"{name:{width}}  {evidence.mean():8.2f}  {rank.mean():7.3f}")
        return "\n".join(lines)


def measure(
    model: nn.Module,
    targets: Targets,
    images: Tensor | tuple[Any, ...] | dict[str, Any],
    *,
    select: Callable[[Site], bool] | None = None,
    activations: tuple[type[nn.Module] | Callable[..., Tensor], ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
) -> Shift:
    """Compare each image's activations with the targets, in one forward pass of the uncorrected model.

        shift = trueup.measure(model, targets, images)
        shift.image_rank      # per image: 0.5 is ordinary, above 0.99 is unusual
        print(shift)          # per site

    images: a batch of images; or, for a model that takes something else, a tuple of positional or a dictionary of
        keyword arguments.

    If an image contains NaN or infinity, its distance is NaN or infinity and its rank 1 at every site that the value
    reaches.
    `select`, `activations` and `leaves` are as for `trueup.sites`.
    """
    return Meter(model, targets, select=select, activations=activations, leaves=leaves)(images)


class Meter:
    """`measure` for many batches: the model is traced once, and clean images are ranked once."""

    def __init__(
        self,
        model: nn.Module,
        targets: Targets,
        *,
        select: Callable[[Site], bool] | None = None,
        activations: tuple[type[nn.Module] | Callable[..., Tensor], ...] = (),
        leaves: tuple[type[nn.Module], ...] = (),
    ) -> None:
        check_targets("measure", targets)
        check_select(select)
        traced = trace(model, activations=activations, leaves=leaves, own_buffers=True, known=targets.sites)
        check_model(targets, traced.model)
        selected = [site.name for site in traced.sites if select is None or select(site)]
        wanted = [*targets.activations, *targets.norms]
        check_sites(traced.model, wanted, selected, selected=select is not None)
        self._targets, self._selected = targets, {name for name in selected if name in wanted}
        self._probe = Probe(traced, lambda site: site.name in self._selected or site.name in targets.gate)
        scores = {name: target.clean_distance() for name, target in targets.activations.items()}
        scores |= {name: target.clean_evidence() for name, target in targets.norms.items()}
        self._clean = {name: clean.sort().values for name, clean in scores.items()}

    def __call__(self, images: Any) -> Shift:
        targets, inputs = self._targets, Inputs.of_example(images)
        features: dict[str, Tensor] = {}

        def look(site: Site, a: Tensor) -> tuple[Tensor, Tensor] | Tensor | None:
            if site.kind == "norm":
                a = a.movedim(site.channel_dim, 1)
            if site.name in targets.gate:
                features[site.name] = targets.gate[site.name].features(a).cpu()
            if site.name not in self._selected:
                return None
            if site.kind == "norm":
                return targets.norms[site.name].mean_evidence(a)
            target = targets.activations[site.name]
            ordered = functional.as_rows(a).sort(dim=1).values
            distance = functional.wasserstein(ordered, target.order_statistics(ordered.shape[1]).to(ordered))
            return distance.float().cpu(), _rank(target.distance(ordered), self._clean[site.name])

        seen = self._probe(inputs, look)
        pairs = {name: pair for name, pair in seen.items() if isinstance(pair, tuple)}
        scores = {name: score for name, score in seen.items() if isinstance(score, Tensor)}
        ranks = [_rank(score, self._clean[name]) for name, score in scores.items()]
        image_rank = torch.full((len(inputs),), torch.nan, dtype=torch.float32, device="cpu")
        if targets.gate:
            read = torch.cat([features[name] for name in targets.gate], dim=1)
            image_rank = (1 - targets.fitted_gate.p_values(read)).float()
        return Shift(
            activations=tuple(pairs),
            distance=_columns([distance for distance, _ in pairs.values()], len(inputs)),
            activation_rank=_columns([rank for _, rank in pairs.values()], len(inputs)),
            norms=tuple(scores),
            evidence=_columns(list(scores.values()), len(inputs)),
            norm_rank=_columns(ranks, len(inputs)),
            image_rank=image_rank,
        )


def _rank(scores: Tensor, clean: Tensor) -> Tensor:
    """Share of clean images, counting the image itself, whose score is lower `(images,)`; 1 if not finite.

    An image that is drawn like the clean ones is equally likely to take any of the n + 1 places among them.
    """
    below = torch.searchsorted(clean, scores.contiguous()) / (len(clean) + 1)
    return torch.where(scores.isfinite(), below, 1.0)


def _columns(columns: list[Tensor], rows: int) -> Tensor:
    if not columns:
        return torch.zeros(rows, 0, dtype=torch.float32, device="cpu")
    return torch.stack(columns, dim=1).float()
