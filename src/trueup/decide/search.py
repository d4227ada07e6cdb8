"""The search for a model's own setting.

Perturb clean images, and ask how often the corrected model says of the perturbed image what the model itself says of
the clean one. That needs no labels. A setting is chosen if it keeps more answers than the uncorrected model, over a mix
of clean, mildly and strongly perturbed images, changes few answers on the clean ones and hardly moves their scores.
This file runs the trials; `trueup.targets.decision.Decision.chosen` chooses among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trueup._answers import Answer, agreement, relative_change
from trueup._correct import build
from trueup._ranks import gathered
from trueup.decide.perturb import PERTURBATIONS
from trueup.decide.pictures import Scales, kind_of, largest_image, perturb_all, reason_against, scales_of, together
from trueup.graph import Inputs, Probe, Select, Site, Trace, device_of
from trueup.rules import Evidence
from trueup.rules.evidence import NUISANCE_FLOOR
from trueup.targets import Decision, Targets, Trial
from trueup.targets.decision import LEFT_ALONE

_STRENGTHS_AT_DEPTH = {
    1 / 4: (0.04,),
    1 / 2: (0.003, 0.006, 0.016, 0.04, 0.065, 0.1, 0.25),
    3 / 4: (0.25,),
    14 / 15: (0.006, 0.01, 0.016, 0.03),
}
_WEIGHED = Evidence(base=0.0, nuisance=True, floor=NUISANCE_FLOOR)
CANDIDATES = (
    *(
        replace(_WEIGHED, budget=1.0, strength=s, depth=d)
        for d, strengths in _STRENGTHS_AT_DEPTH.items()
        for s in strengths
    ),
    *(replace(_WEIGHED, strength=s) for s in (0.1, 0.25)),
    Evidence(),
)
"""Settings that are tried. The first ones have no gate and treat every image alike, on some share of the norms. The
next two are gated: they may be bolder, since images that look usual are hardly corrected. All of these have no base, so
only evidence moves a channel, and it counts less if the channel is about content. Their floor keeps them from restoring
detail that a blurred image does not hold. The last is good on small tasks and too bold for many models.
"""

IMAGES = 240  # clean images that a decision is made on, so that it takes fewer passes than 60 over 500 images
FEWEST = 50  # with fewer different images, nothing can be shown to be safe
BYTES = 1 << 30  # of images kept for the decision, at most
DRIFT_IMAGES = 100  # of these, used to measure how statistics drift
DRIFT_LEVEL = 1.0
MILD = 0.5  # level of perturbation
STRONG = (1.5, 3.0, 6.0)  # the strong level is the first of these that ...
FOOLED = 0.1  # ... changes this share of the model's answers; on an easy task, weaker ones do not tell settings apart
LEVEL_IMAGES = 100  # images on which the strong level is found
WEIGHTS = (0.2, 0.4, 0.4)  # of a clean, a mildly and a strongly perturbed image in an image's value
PER_IMAGE = 3  # perturbations of each level that an image gets, in turn
SMALLEST_BATCH = 16  # a loader of single images should not mean single forward passes


class ImageSample:
    """Clean images kept for the decision: those with the smallest hashes, so that no order or batch matters."""

    def __init__(self) -> None:
        self._most, self._hashes, self._images = IMAGES, torch.empty(0, dtype=torch.int64), list[Inputs]()
        self._batch = SMALLEST_BATCH

    def add(self, hashes: Tensor, batch: Tensor | Inputs) -> None:
        """Keep images of a batch if their hashes `(batch,)` are small enough. Copies of an image are kept once."""
        inputs = Inputs.of(batch)
        self._batch = max(self._batch, len(inputs))
        self._most = min(self._most, max(FEWEST, BYTES // max(1, largest_image(inputs))))
        known = set(self._hashes.tolist())
        largest = self._hashes[-1] if len(self._hashes) >= self._most else None
        fresh = [
            k for k, value in enumerate(hashes.tolist()) if value not in known and (largest is None or value < largest)
        ]
        together = torch.cat([self._hashes, hashes[fresh]])
        # A copy: a view would keep the whole batch in memory.
        both = [*self._images, *(inputs.part(k, k + 1).to(torch.device("cpu"), copy=True) for k in fresh)]
        ordered, order = together.sort(stable=True)
        distinct = torch.ones(len(ordered), dtype=torch.bool)
        distinct[1:] = ordered[1:] != ordered[:-1]
        chosen = order[distinct][: self._most].tolist()
        self._hashes, self._images = together[chosen], [both[k] for k in chosen]

    def __len__(self) -> int:
        return len(self._images)

    @property
    def reason_against(self) -> str | None:
        """The reason why the images cannot be perturbed; None if they can."""
        return reason_against(self._images)

    def batches(self) -> Iterator[tuple[Tensor, Inputs]]:
        """Batches of images of one shape, each with the images' numbers in the order of their hashes."""
        by_kind: dict[Hashable, list[int]] = {}
        for number, image in enumerate(self._images):
            by_kind.setdefault(kind_of(image), []).append(number)
        for numbers in by_kind.values():
            for start in range(0, len(numbers), self._batch):
                some = numbers[start : start + self._batch]
                yield torch.tensor(some), together([self._images[k] for k in some])


def decide(
    traced: Trace,
    targets: Targets,
    sample: ImageSample,
    *,
    answer: Answer,
    max_changed: float,
    select: Select | None = None,
    candidates: tuple[Evidence, ...] = CANDIDATES,
    report: Callable[[int, int], None] = lambda _done, _all: None,
) -> Targets:
    """Targets with the drift of each norm and a decision. The trace must own its buffers.

    Under `torch.distributed`, all ranks must call it with the same targets; each tries all candidates on its own
    images, and the trials of all ranks are pooled. `report` is called with the number of forward passes done and to be
    done, in images.
    """
    usable = [rule for rule in candidates if _applies(rule, traced, targets, select)]
    reasons = gathered(_reason_to_skip(targets, sample, usable, max_changed))
    if (reason := next((found for found in reasons if found is not None), None)) is not None:
        return replace(targets, decision=Decision(max_changed=max_changed, note=reason))
    device = device_of(traced.model)
    batches = list(sample.batches())
    scales = scales_of([inputs for _, inputs in batches], device)
    error: Exception | None = None
    own: list[Tensor] = []
    try:
        own = [_answer_of(traced.model, inputs.to(device, copy=True), answer)[0] for _, inputs in batches]
    except ValueError as found:  # the output is not class scores
        error = found
    if failed := next((str(found) for found in gathered(error) if found is not None), None):
        return replace(targets, decision=Decision(max_changed=max_changed, note=failed))
    targets = _with_drift(traced, targets, batches, scales, device)
    levels = (MILD, _strong_level(traced.model, batches, own, scales, answer, device))
    trials = _trials(traced, targets, sample, batches, own, scales, levels, usable, answer, select, report)
    parts = [Decision(part, max_changed) for part in gathered(trials) if part]
    decision = parts[0]
    for part in parts[1:]:
        decision = decision + part
    return replace(targets, decision=decision)


def _trials(
    traced: Trace,
    targets: Targets,
    sample: ImageSample,
    batches: list[tuple[Tensor, Inputs]],
    own: list[Tensor],
    scales: Scales,
    levels: tuple[float, float],
    candidates: list[Evidence],
    answer: Answer,
    select: Select | None,
    report: Callable[[int, int], None],
) -> tuple[Trial, ...]:
    """Try the model as it is, and every candidate, on this rank's images."""
    if not batches:
        return ()
    device = device_of(traced.model)
    there = replace(targets, norms={name: target.to(device) for name, target in targets.norms.items()})
    rules = (LEFT_ALONE, *candidates)
    networks: list[nn.Module] = [traced.model, *(build(traced, there, rule, select) for rule in candidates)]
    kept = torch.zeros(len(rules), 1 + len(levels), len(sample), dtype=torch.float64)
    moved = torch.zeros(len(rules), dtype=torch.float64)
    done, total = 0, len(sample) * len(rules) * (1 + len(levels) * PER_IMAGE)
    for (numbers, batch), said in zip(batches, own, strict=True):
        for level, weight, inputs, rows in _variants(batch.to(device), numbers, scales, levels):
            uncorrected: Any = None
            for k, network in enumerate(networks):
                now, output = _answer_of(network, inputs.to(None, copy=True), answer)
                found = agreement(now, said[rows.to(said.device)])
                kept[k, level].index_add_(0, numbers[rows], weight * found.cpu())
                if level == 0:
                    uncorrected = output if uncorrected is None else uncorrected
                    moved[k] += relative_change(uncorrected, output).sum()
                done += len(inputs)
                report(done, total)
    values = (torch.tensor(WEIGHTS, dtype=torch.float64)[:, None] * kept).sum(dim=1)
    gains = values - values[0]
    return tuple(
        Trial(
            rule,
            images=len(sample),
            changed=_changed(rule, 1 - kept[k, 0]),
            kept=tuple(kept[k, 1:].sum(dim=1).tolist()),
            gain=float(gains[k].sum()),
            gain_square=float(gains[k].square().sum()),
            moved=float(moved[k]),
        )
        for k, rule in enumerate(rules)
    )


def _changed(rule: Evidence, lost: Tensor) -> float:
    """Clean answers that a rule changes. A gate was fitted to every other image, so only the rest can count for it."""
    if rule.gated and len(lost) > 1:
        return float(lost[1::2].mean() * len(lost))
    return float(lost.sum())


def _answer_of(network: nn.Module, inputs: Inputs, answer: Answer) -> tuple[Tensor, Any]:
    """A network's answers and its whole output."""
    with torch.inference_mode():
        output = network(*inputs.args, **inputs.kwargs)
        said = answer(output)
    if not isinstance(said, Tensor) or said.dim() == 0 or len(said) != len(inputs) or said.is_floating_point():
        what = f"{said.dtype} of shape {tuple(said.shape)}" if isinstance(said, Tensor) else type(said).__name__
        raise TypeError(
            f"answer= returned {what} for {len(inputs)} images; expected a tensor (batch, ...) of classes or other "
            "whole numbers, which are compared for equality"
        )
    return said, output


def _variants(
    batch: Inputs, numbers: Tensor, scales: Scales, levels: tuple[float, ...]
) -> Iterator[tuple[int, float, Inputs, Tensor]]:
    """Yield the clean batch and its perturbed copies: level, weight of one answer, inputs, rows of the batch."""
    yield 0, 1.0, batch, torch.arange(len(batch))
    names = list(PERTURBATIONS)
    for number, level in enumerate(levels, start=1):
        for k, name in enumerate(names):
            rows = torch.nonzero((numbers + k) % len(names) < PER_IMAGE).flatten()
            if len(rows):
                some = perturb_all(batch.take(rows), name, scales, numbers=numbers[rows], level=level)
                yield number, 1 / PER_IMAGE, some, rows


def _strong_level(
    model: nn.Module,
    batches: list[tuple[Tensor, Inputs]],
    own: list[Tensor],
    scales: Scales,
    answer: Answer,
    device: torch.device | None,
) -> float:
    """The first of the strong levels that changes enough of the model's own answers, over the images of all ranks."""
    for level in STRONG[:-1]:
        lost, tried = 0.0, 0
        for (numbers, some), said in zip(_first(LEVEL_IMAGES, batches, device), own, strict=False):
            tried += len(some)
            for number, weight, inputs, rows in _variants(some, numbers, scales, (level,)):
                if number:
                    now, _ = _answer_of(model, inputs, answer)
                    lost += weight * float((1 - agreement(now, said[rows.to(said.device)])).sum())
        parts = gathered((lost, tried))
        if sum(part[0] for part in parts) >= FOOLED * sum(part[1] for part in parts):
            return level
    return STRONG[-1]


def _with_drift(
    traced: Trace,
    targets: Targets,
    batches: list[tuple[Tensor, Inputs]],
    scales: Scales,
    device: torch.device | None,
) -> Targets:
    """Measure how far each statistic moves when an image is perturbed, over the images of all ranks."""
    probe = Probe(traced, lambda site: site.name in targets.norms)

    def look(site: Site, a: Tensor) -> Tensor:
        return targets.norms[site.name].drifting(a.movedim(site.channel_dim, 1))

    sums: dict[str, Tensor] = {}
    seen = 0
    for numbers, some in _first(DRIFT_IMAGES, batches, device):
        clean = probe(some, look)
        for name in PERTURBATIONS:
            found = probe(perturb_all(some, name, scales, numbers=numbers, level=DRIFT_LEVEL), look)
            seen += len(some)
            for site, statistics in found.items():
                moved = (statistics - clean[site]).square().sum(dim=0).cpu()
                sums[site] = sums[site] + moved if site in sums else moved
    norms = dict(targets.norms)
    for part, count in gathered((sums, seen)):
        for name, moved in part.items():
            known = norms[name]
            drift = moved if known.drift is None else known.drift + moved
            norms[name] = replace(known, drift=drift, drifted=known.drifted + count)
    return replace(targets, norms=norms)


def _first(
    count: int, batches: list[tuple[Tensor, Inputs]], device: torch.device | None
) -> Iterator[tuple[Tensor, Inputs]]:
    """Yield the first images of batches on the device, `count` in all."""
    for numbers, batch in batches:
        if count > 0:
            yield numbers[:count], batch.part(0, count).to(device)
        count -= len(batch)


def _applies(rule: Evidence, traced: Trace, targets: Targets, select: Select | None) -> bool:
    """Whether a rule can correct something in this model."""
    norms = [site for site in traced.sites if site.kind == "norm"]
    chosen = norms[: rule.corrected(len(norms))]
    there = any(site.name in targets.norms and (select is None or select(site)) for site in chosen)
    return there and (bool(targets.gate) or not rule.gated)


def _reason_to_skip(
    targets: Targets, sample: ImageSample, candidates: list[Evidence], max_changed: float
) -> str | None:
    """The reason to try nothing, or None."""
    if not targets.norms or not candidates:
        return "it has no norm that could be corrected, or `select` left them out"
    images = sum(gathered(len(sample)))
    if images < FEWEST:
        return f"{images} different images are too few to show that a setting is safe; give {FEWEST} or more"
    if images < (fewest := math.ceil(1 / max_changed - 1e-9) - 1):
        return (
            f"{images} different images cannot show that at most {max_changed:.2%} of the answers change; give {fewest}"
        )
    return sample.reason_against
