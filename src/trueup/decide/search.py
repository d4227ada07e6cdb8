"""The search for a model's own setting.

A setting is judged by how often the corrected model answers a perturbed image as the model itself answers the clean
one. This needs no labels. A setting is chosen if it keeps more answers than the uncorrected model, over a mix of clean,
mildly and strongly perturbed images, changes few answers on the clean ones and hardly moves their scores. Weights of
the evidence are learned first (`trueup.decide.tune`), on other images. `trueup.decide.contest` runs the trials, and
`trueup.targets.decision.Decision.chosen` chooses among them. The `depth` of a setting says how many norms it corrects;
`trueup._correct.build` leaves the others alone.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from trueup._answers import Agreement, Answer, agreement
from trueup._correct import corrected_by
from trueup._distributed import gathered
from trueup.decide.contest import LEVEL_WEIGHTS, PERTURBATIONS_PER_IMAGE, Contest, answer_of, perturbed_copies
from trueup.decide.perturb import PERTURBATIONS
from trueup.decide.pictures import Scales, perturb_all, scales_of
from trueup.decide.progress import Progress
from trueup.decide.reasons import Declined, answers_alike, background_of, decline_for, min_images, too_few_images
from trueup.decide.sample import ImageSample
from trueup.decide.tune import IMAGES_PER_PERTURBATION, PERTURBATIONS_PER_STEP, START, STEPS, tuned_weights
from trueup.graph import Inputs, Probe, Select, Site, Trace, device_of
from trueup.rules import Evidence
from trueup.rules.evidence import NUISANCE_FLOOR
from trueup.targets import Decision, Targets, Trial
from trueup.targets.norm import mean_weights

_STRENGTHS_AT_DEPTH = {
    1 / 4: (0.04,),
    1 / 2: (0.003, 0.006, 0.016, 0.04, 0.065, 0.1, 0.25),
    3 / 4: (0.25,),
    14 / 15: (0.006, 0.01, 0.016, 0.03),
}
_WEIGHED = Evidence(base=0.0, nuisance=True, floor=NUISANCE_FLOOR)
_TUNED = replace(_WEIGHED, nuisance=False, tuned=True)
_BOLD = (*(replace(_WEIGHED, strength=s) for s in (0.1, 0.25)), Evidence())
CANDIDATES = (
    *(
        replace(_WEIGHED, budget=1.0, strength=s, depth=d)
        for d, strengths in _STRENGTHS_AT_DEPTH.items()
        for s in strengths
    ),
    *_BOLD,
)
"""Settings that are tried where no weights can be learned. The first ones have no gate and treat every image alike, on
some share of the norms. The next two are gated: they may be bolder, since images that look usual are hardly corrected.
All of these have no base, so only evidence moves a channel, and it counts less if the channel is about content. Their
floor keeps them from restoring detail that a blurred image does not hold. The last is good on small tasks and too bold
for many models."""

TUNED_CANDIDATES = (
    *(replace(_TUNED, budget=1.0, strength=s) for s in (0.00004, 0.00015, 0.0003, 0.0006, 0.0012, 0.0025, 0.005, 0.01)),
    *(replace(_TUNED, strength=s) for s in (0.0025, 0.01, 0.04)),
    *_BOLD,
)
"""Settings that are tried with learned weights: strengths without a gate, on all norms, since the weights know which of
them matter; bolder ones with a gate; and the bold ones from above."""

DRIFT_IMAGES = 100  # images used to measure how statistics drift
DRIFT_LEVEL = 1.0  # level of perturbation at which it is measured
MILD = 0.5  # level of a mild perturbation
STRONG = (1.5, 3.0, 6.0)  # strong levels to try, weakest first
FOOLED = 0.1  # take the first that changes this share of the model's answers: a weaker one cannot tell settings apart
LEVEL_IMAGES = 100  # images used to find the strong level
PASSES_PER_IMAGE = 4  # a forward and backward pass takes about as long as this many forward passes
TUNING_PASSES = PASSES_PER_IMAGE * STEPS * PERTURBATIONS_PER_STEP * IMAGES_PER_PERTURBATION * len(LEVEL_WEIGHTS)


def decide(
    traced: Trace,
    targets: Targets,
    sample: ImageSample,
    *,
    answer: Answer,
    max_changed: float,
    select: Select | None = None,
    report: Callable[[int, int], None] = lambda _done, _all: None,
) -> Targets:
    """Targets with the drift of each norm, learned weights and a decision. The trace must own its buffers.

    Weights are learned on one half of the images, and settings tried on the other. With too few images for that, fixed
    settings are tried on all of them. Under `torch.distributed`, all ranks must call it with the same targets. Each
    learns from its own images and tries all candidates on them; weights are averaged, and trials pooled. `report` is
    called with the forward passes done so far and in total, in images.
    """
    try:
        return _decided(traced, targets, sample, answer, max_changed, select, report)
    except Declined as reason:  # on all ranks alike
        return replace(targets, decision=Decision(max_changed=max_changed, note=str(reason)))


def _decided(
    traced: Trace,
    targets: Targets,
    sample: ImageSample,
    answer: Answer,
    max_changed: float,
    select: Select | None,
    report: Callable[[int, int], None],
) -> Targets:
    """As `decide`, but raise `Declined` where nothing can be tried."""
    decline_for(*gathered(_reason_to_skip(traced, targets, sample, select, max_changed)))
    device = device_of(traced.model)
    sample, scales = _ready(traced.model, sample, max_changed, device)
    tuning, trying = sample.split()
    may_tune = all(sum(gathered(len(half))) >= min_images(max_changed) for half in (tuning, trying))
    tuning, trying = (tuning, trying) if may_tune else (sample, sample)
    batches = list(trying.batches())
    own = _own_answers(traced.model, batches, answer, device)
    targets = _with_drift(traced, targets, tuning.batches(), scales, device)
    agree = functools.partial(agreement, background=background_of(own))
    levels = (MILD, _strong_level(traced.model, batches, own, scales, answer, agree, device))
    candidates = 1 + len(TUNED_CANDIDATES if may_tune else CANDIDATES)
    trying_passes = len(trying) * (1 + len(levels) * PERTURBATIONS_PER_IMAGE) * candidates
    progress = Progress(report, trying_passes + (TUNING_PASSES if may_tune else 0))
    if may_tune:
        targets = _tuned(traced, targets, tuning, scales, levels, answer, select, progress)
    usable = [rule for rule in _candidates(targets) if _applies(rule, traced, targets, select)]
    held_out = targets.held_out(trying.hashes)
    contest = Contest(traced, targets, batches, held_out, own, scales, levels, usable, answer, agree, select, progress)
    contest.try_clean_images()
    clean = Decision(_pooled(contest.trials()), max_changed)
    contest.keep([clean.allows(trial) for trial in clean.trials])
    contest.try_perturbed_images()
    progress.finish()
    refused = sum(not clean.allows(trial) for trial in clean.trials[1:])
    return replace(targets, decision=Decision(_pooled(contest.trials()), max_changed, refused=refused))


def _ready(
    model: nn.Module, sample: ImageSample, max_changed: float, device: torch.device | None
) -> tuple[ImageSample, Scales]:
    """The images that show something, in batches that the model takes, and the scales of their pictures."""
    if any(gathered(_refuses_larger_batches(model, sample, device))):
        sample = sample.part(range(len(sample)), limited=True)
    scales = scales_of(lambda: (inputs for _, inputs in sample.batches()), device)
    kept = sample.without_flat_images(scales)
    if not (flat := sum(gathered(len(sample) - len(kept)))):
        return sample, scales
    warnings.warn(f"calibrate: {flat} images are of one colour and were left out of the decision", stacklevel=5)
    decline_for(too_few_images(sum(gathered(len(kept))), max_changed))
    return kept, scales_of(lambda: (inputs for _, inputs in kept.batches()), device)


def _own_answers(
    model: nn.Module, batches: list[tuple[Tensor, Inputs]], answer: Answer, device: torch.device | None
) -> list[Tensor]:
    """The model's own answers to clean images, per batch."""
    error: Exception | None = None
    own: list[Tensor] = []
    try:
        own = [answer_of(model, inputs.to(device), answer)[0] for _, inputs in batches]
    except ValueError as found:  # the output is not class scores
        error = found
    decline_for(*(str(found) for found in gathered(error) if found is not None))
    decline_for(answers_alike(own))
    return own


def _candidates(targets: Targets) -> tuple[Evidence, ...]:
    tuned = any(norm.weights is not None for norm in targets.norms.values())
    return TUNED_CANDIDATES if tuned else CANDIDATES


def _pooled(trials: tuple[Trial, ...]) -> tuple[Trial, ...]:
    """Trials over the images of all ranks; ranks without images have none."""
    parts = [part for part in gathered(trials) if part]
    return tuple(functools.reduce(operator.add, same) for same in zip(*parts, strict=True))


def _tuned(
    traced: Trace,
    targets: Targets,
    sample: ImageSample,
    scales: Scales,
    levels: tuple[float, float],
    answer: Answer,
    select: Select | None,
    progress: Progress,
) -> Targets:
    """Targets with the mean of the weights that all ranks learned."""
    sites = corrected_by(START, traced.sites, targets, select)
    mine = None
    if len(sample) and sites:
        mine = tuned_weights(
            traced,
            targets,
            sample,
            scales,
            sites=sites,
            answer=answer,
            levels=levels,
            shares=LEVEL_WEIGHTS,
            report=lambda images: progress.add(PASSES_PER_IMAGE * images),
        )
    ranks = gathered((mine or {}, len(sample)))
    weights = {site.name: mean_weights([(part.get(site.name), images) for part, images in ranks]) for site in sites}
    return replace(
        targets, norms={name: replace(norm, weights=weights.get(name)) for name, norm in targets.norms.items()}
    )


def _strong_level(
    model: nn.Module,
    batches: list[tuple[Tensor, Inputs]],
    own: list[Tensor],
    scales: Scales,
    answer: Answer,
    agree: Agreement,
    device: torch.device | None,
) -> float:
    """Find the first strong level that changes enough of the model's own answers, over the images of all ranks."""
    for level in STRONG[:-1]:
        lost, tried = 0.0, 0
        for (numbers, some), clean_answers in zip(_first(LEVEL_IMAGES, batches, device), own, strict=False):
            tried += len(some)
            for _, inputs, rows in perturbed_copies(some, numbers, scales, (level,)):
                answers, _ = answer_of(model, inputs, answer)
                kept = agree(answers, clean_answers[rows.to(clean_answers.device)])
                lost += float((1 - kept).sum()) / PERTURBATIONS_PER_IMAGE
        parts = gathered((lost, tried))
        if sum(part[0] for part in parts) >= FOOLED * sum(part[1] for part in parts):
            return level
    return STRONG[-1]


def _with_drift(
    traced: Trace,
    targets: Targets,
    batches: Iterable[tuple[Tensor, Inputs]],
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
                # A perturbed image may overflow; a file that holds infinity would be refused.
                change = torch.nan_to_num(statistics - clean[site], nan=0.0, posinf=0.0, neginf=0.0)
                moved = change.square().sum(dim=0).cpu()
                sums[site] = sums[site] + moved if site in sums else moved
    norms = dict(targets.norms)
    for part, count in gathered((sums, seen)):
        for name, moved in part.items():
            known = norms[name]
            drift = moved if known.drift is None else known.drift + moved
            norms[name] = replace(known, drift=drift, drifted=known.drifted + count)
    return replace(targets, norms=norms)


def _first(
    count: int, batches: Iterable[tuple[Tensor, Inputs]], device: torch.device | None
) -> Iterator[tuple[Tensor, Inputs]]:
    """Yield the first images of batches on the device, `count` in all."""
    for numbers, batch in batches:
        yield numbers[:count], batch.part(0, count).to(device)
        count -= len(batch)
        if count <= 0:
            return


def _applies(rule: Evidence, traced: Trace, targets: Targets, select: Select | None) -> bool:
    """Whether a rule can correct something in this model."""
    reads = bool(targets.gate) or not rule.gated
    return reads and bool(corrected_by(rule, traced.sites, targets, select))


def _reason_to_skip(
    traced: Trace, targets: Targets, sample: ImageSample, select: Select | None, max_changed: float
) -> str | None:
    """The reason to try nothing, or None."""
    if not targets.norms or not any(_applies(rule, traced, targets, select) for rule in CANDIDATES):
        return "it has no norm that could be corrected, or `select` left them out; trueup.Correction() needs no norms"
    return too_few_images(sum(gathered(len(sample))), max_changed) or sample.reason_against


def _refuses_larger_batches(model: nn.Module, sample: ImageSample, device: torch.device | None) -> bool:
    """Whether a model fails on batches that are larger than the loader's, as some take one image at a time."""
    if not (len(sample) and sample.has_larger_batches):
        return False
    _, inputs = next(iter(sample.batches()))
    try:
        with torch.inference_mode():
            inputs.to(device).run(model)
    except (RuntimeError, ValueError, AssertionError):
        return True
    return False
