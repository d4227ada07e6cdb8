"""The search for a model's own setting.

Perturb clean images, and ask how often the corrected model says of the perturbed image what the model itself says of
the clean one. That needs no labels. A setting is chosen if it keeps more answers than the uncorrected model, over a mix
of clean, mildly and strongly perturbed images, and changes few answers on the clean ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from trueup._answers import Answer, agreement
from trueup._correct import build
from trueup.decide.perturb import PERTURBATIONS, Scale, perturb
from trueup.graph import Probe, Site, Trace
from trueup.rules import Evidence
from trueup.targets import Decision, Targets, Trial
from trueup.targets.decision import NOTHING

STRENGTHS = (0.004, 0.006, 0.01, 0.016, 0.025, 0.04, 0.065, 0.1)
CANDIDATES = (
    *(Evidence(budget=1.0, strength=strength, base=0.0, nuisance=True) for strength in STRENGTHS),
    Evidence(),
)
"""Settings that are tried. The first ones have neither gate nor base: evidence alone moves a channel, and weighs less
where a channel is about content. The last is stronger and gated: best on small tasks, too bold for most large models."""

IMAGES = 300  # clean images that a decision is made on
FEWEST = 50  # with fewer different images, nothing can be shown to be safe
BYTES = 1 << 30  # of images kept for the decision, at most
DRIFT_IMAGES = 100  # of these, used to measure how statistics drift
DRIFT_LEVEL = 1.0
LEVELS = (0.5, 1.5)  # of perturbation: mild and strong
WEIGHTS = (0.2, 0.4, 0.4)  # of a clean, a mildly and a strongly perturbed image in an image's value
PER_IMAGE = 4  # perturbations of each level that an image gets, in turn


class ImageSample:
    """Clean images kept for the decision: those with the smallest names, so that no order or batch matters."""

    def __init__(self, most: int = IMAGES) -> None:
        self._most, self._names, self._images = most, torch.empty(0, dtype=torch.int64), list[Tensor]()
        self.batch = 0

    def add(self, names: Tensor, images: Tensor) -> None:
        """Keep images of a batch if their names `(batch,)` are small enough; copies of an image are kept once."""
        self.batch = max(self.batch, len(images))
        most = max(FEWEST, min(self._most, BYTES // max(1, images[0].nbytes)))
        largest = self._names[-1] if len(self._names) >= most else None
        fresh = [k for k, name in enumerate(names) if (largest is None or name < largest) and name not in self._names]
        if not fresh:
            return
        together = torch.cat([self._names, names[fresh]])
        _, first = _unique_first(together)
        both = [*self._images, *(images[k].cpu() for k in fresh)]
        order = first[:most].tolist()
        self._names, self._images = together[order], [both[k] for k in order]

    def __len__(self) -> int:
        return len(self._images)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images of one shape, each with the images' numbers."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for number, image in enumerate(self._images):
            by_shape.setdefault(tuple(image.shape), []).append(number)
        for numbers in by_shape.values():
            for start in range(0, len(numbers), max(self.batch, 1)):
                some = numbers[start : start + max(self.batch, 1)]
                yield torch.tensor(some), torch.stack([self._images[k] for k in some])


def decide(
    traced: Trace,
    targets: Targets,
    sample: ImageSample,
    *,
    answer: Answer,
    max_changed: float,
    candidates: tuple[Evidence, ...] = CANDIDATES,
    report: Callable[[int, int], None] = lambda _done, _all: None,
) -> Targets:
    """Targets with the drift of each norm and a decision. The trace must own its buffers.

    `report` is called with the number of forward passes done and to be done, in images.
    """
    if (reason := _why_not(targets, sample)) is not None:
        return replace(targets, decision=Decision(max_changed=max_changed, note=reason))
    device = next((tensor.device for tensor in (*traced.model.parameters(), *traced.model.buffers())), None)
    batches = list(sample.batches())
    scale = Scale(*(part.to(device) for part in Scale.of_batches([images for _, images in batches])))
    try:
        with torch.inference_mode():
            own = [answer(traced.model(images.to(device, copy=True))) for _, images in batches]
    except ValueError as error:
        return replace(targets, decision=Decision(max_changed=max_changed, note=str(error)))
    targets = _with_drift(traced, targets, batches, scale, device)
    on_device = replace(targets, norms={name: target.to(device) for name, target in targets.norms.items()})
    rules = (NOTHING, *candidates)
    networks: list[nn.Module] = [traced.model, *(build(traced, on_device, rule) for rule in candidates)]
    kept = torch.zeros(len(rules), 1 + len(LEVELS), len(sample), dtype=torch.float64)
    done, total = 0, len(sample) * len(rules) * (1 + len(LEVELS) * PER_IMAGE)
    with torch.inference_mode():
        for (numbers, images), said in zip(batches, own, strict=True):
            for level, weight, inputs, rows in _variants(images.to(device), numbers, scale):
                for k, network in enumerate(networks):
                    found = agreement(answer(network(inputs.clone())), said[rows.to(said.device)])
                    kept[k, level].index_add_(0, numbers[rows], weight * found.cpu())
                    done += len(inputs)
                    report(done, total)
    values = (torch.tensor(WEIGHTS, dtype=torch.float64)[:, None] * kept).sum(dim=1)
    gains = values - values[0]
    trials = tuple(
        Trial(
            rule,
            images=len(sample),
            changed=float((1 - kept[k, 0]).sum()),
            kept=tuple(kept[k, 1:].sum(dim=1).tolist()),
            gain=float(gains[k].sum()),
            gain_square=float(gains[k].square().sum()),
        )
        for k, rule in enumerate(rules)
    )
    return replace(targets, decision=Decision(trials, max_changed))


def _variants(images: Tensor, numbers: Tensor, scale: Scale) -> Iterator[tuple[int, float, Tensor, Tensor]]:
    """What a batch is tried on: level, weight of one answer, inputs, and the rows of the batch that they come from."""
    yield 0, 1.0, images, torch.arange(len(images))
    names = list(PERTURBATIONS)
    for number, level in enumerate(LEVELS, start=1):
        for k, name in enumerate(names):
            rows = torch.nonzero((numbers + k) % len(names) < PER_IMAGE).flatten()
            if len(rows):
                some = perturb(images[rows.to(images.device)], name, scale, numbers=numbers[rows], level=level)
                yield number, 1 / PER_IMAGE, some, rows


def _with_drift(
    traced: Trace,
    targets: Targets,
    batches: list[tuple[Tensor, Tensor]],
    scale: Scale,
    device: torch.device | None,
) -> Targets:
    """Measure how far each statistic moves when an image is perturbed."""
    probe = Probe(traced, lambda site: site.name in targets.norms)

    def look(site: Site, a: Tensor) -> Tensor:
        return targets.norms[site.name].statistics(a.movedim(site.channel_dim, 1))

    sums: dict[str, Tensor] = {}
    seen = 0
    for numbers, images in batches:
        if seen >= DRIFT_IMAGES * len(PERTURBATIONS):
            break
        numbers, images = numbers[:DRIFT_IMAGES], images[:DRIFT_IMAGES].to(device)
        clean = probe(images, look)
        for name in PERTURBATIONS:
            found = probe(perturb(images, name, scale, numbers=numbers, level=DRIFT_LEVEL), look)
            seen += len(images)
            for site, statistics in found.items():
                moved = (statistics - clean[site]).square().sum(dim=0).cpu()
                sums[site] = sums[site] + moved if site in sums else moved
    norms = {
        name: replace(target, drift=sums[name], drifted=seen) if name in sums else target
        for name, target in targets.norms.items()
    }
    return replace(targets, norms=norms)


def _why_not(targets: Targets, sample: ImageSample) -> str | None:
    """Why no setting can be tried; None if one can."""
    if not targets.norms:
        return "the model has no norm that could be corrected"
    if len(sample) < FEWEST:
        return f"{len(sample)} different images are too few to show that a setting is safe; give {FEWEST} or more"
    shapes = {tuple(images.shape[1:]) for _, images in sample.batches()}
    if any(len(shape) != 3 for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        return f"its inputs have shape {min(shapes)}, and only images (channels, height, width) can be perturbed"
    if not next(images for _, images in sample.batches()).is_floating_point():
        return "its inputs are not floating-point images, which cannot be perturbed"
    return None


def _unique_first(values: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending distinct values, and the place of the first of each."""
    ordered, order = values.sort(stable=True)
    first = torch.ones(len(values), dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first], order[first]
