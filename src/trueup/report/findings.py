"""The numbers behind a report, from three passes over the images: the model, the corrected model, and `measure`."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trueup._answers import most_likely
from trueup._batches import images_of
from trueup._correct import Corrected, correct
from trueup._measure import Meter, Shift
from trueup.graph import Activation, clone, device_of
from trueup.monitor import Monitor, Snapshot
from trueup.monitor.binomial import share_of
from trueup.monitor.monitor import ROUNDING
from trueup.report.images import NamedImages
from trueup.report.thumbnail import thumbnail
from trueup.rules import Rule
from trueup.targets import Targets

FAR = 0.6  # share of images beyond the clean median that counts as a deviation


class Shown(NamedTuple):
    """One of the most unusual images, as the report shows it."""

    number: int  # in its set, from 0
    name: str
    p: float  # NaN if the targets cannot tell
    png: bytes
    evidence: dict[str, float]  # of the norms at which it deviates most, largest first
    before: int | None  # the model's answer
    after: int | None  # the corrected model's answer


@dataclass(frozen=True, eq=False)
class SetFindings:
    """Results for one set of images."""

    name: str
    images: int
    p: Tensor  # (images,); NaN if the targets cannot tell
    norms: tuple[str, ...]
    evidence: Tensor  # (images, norms)
    activations: tuple[str, ...]
    activation_rank: Tensor  # (images, activations)
    answers: tuple[Tensor, Tensor] | None  # (images,) before and after; None if the outputs are not class scores
    snapshot: Snapshot | None
    shown: list[Shown]  # the most unusual images, most unusual first
    farthest: int = 0  # images with the smallest p-value that there is


class Cost(NamedTuple):
    """Time of one forward pass, in milliseconds per image, and where it was measured."""

    batch: int
    model: float
    corrected: float
    reported: float | None
    machine: str


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything that a report shows."""

    model: str
    targets: Targets
    rule: Rule
    corrected_sites: int
    clean_evidence: dict[str, Tensor]  # per norm, of clean images, ascending
    sets: list[SetFindings]
    cost: Cost


class _Networks(NamedTuple):
    model: nn.Module
    plain: Corrected
    reporting: Corrected | None
    meter: Meter


def find(
    model: nn.Module,
    targets: Targets,
    images: Tensor | Iterable[Any],
    *,
    against: Tensor | Iterable[Any] | None = None,
    names: tuple[str, str] = ("these images", "the other images"),
    rule: Rule | None = None,
    most_unusual: int = 12,
    batch: int = 32,
    activations: tuple[Activation, ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
) -> Findings:
    """Look at one or two sets of images. The arguments are those of `write_report`."""

    def own() -> nn.Module:
        """A forward pass may change buffers: each network has its own, and the model's stay as they are."""
        return clone(model, own_buffers=True).eval()

    robust = correct(own(), targets, rule, activations=activations, leaves=leaves)
    reporting = None
    if targets.norms:
        reporting = correct(own(), targets, robust._rule, activations=activations, leaves=leaves, report=True)
    meter = Meter(model, targets, activations=activations, leaves=leaves)
    networks = _Networks(own(), robust, reporting, meter)
    device = device_of(model)
    given = [images] if against is None else [images, against]
    sets, first = [], None
    for name, some in zip(names, given, strict=False):
        batches = torch.split(some, batch) if isinstance(some, Tensor) else some
        image_names = some.names if isinstance(some, NamedImages) else None
        looked = _findings_of(name, networks, images_of(batches, device), image_names, most_unusual)
        sets.append(looked[0])
        first = looked[1] if first is None else first
    assert first is not None
    return Findings(
        type(model).__name__,
        targets,
        robust._rule,
        len(robust._sites),
        {name: target.clean_evidence().sort().values for name, target in targets.norms.items()},
        sets,
        _measured_cost(networks, first),
    )


def deviating_norms(some: SetFindings, clean: Mapping[str, Tensor]) -> dict[str, float]:
    """Norms at which images deviate more than clean ones, with the share of images beyond the clean median.

    Half of the clean images lie beyond it. A norm counts if the share's exact lower bound, at a confidence of 99.9 %
    for all norms together, is above `FAR`: the median is itself an estimate.
    """
    found, confidence = {}, 1 - 0.002 / max(1, len(some.norms))
    for name, evidence in zip(some.norms, some.evidence.T, strict=True):
        beyond = int((~(evidence <= clean[name].median())).sum())
        share = share_of(beyond, some.images, confidence=confidence)
        if share.low > FAR:
            found[name] = share.value
    return found


@torch.inference_mode()
def _findings_of(
    name: str, networks: _Networks, batches: Iterator[Tensor], image_names: Sequence[str] | None, most: int
) -> tuple[SetFindings, Tensor]:
    """Return the results for a set, and its first batch."""
    monitor = None if networks.reporting is None else Monitor(networks.reporting, unusual=_level(networks.reporting))
    shifts: list[Shift] = []
    p_values, answers, changed = list[Tensor](), list[tuple[Tensor, Tensor]](), None
    kept: list[tuple[float, int, Tensor]] = []  # the most unusual images so far
    seen, first, comparable = 0, None, True
    for batch in batches:
        first = batch if first is None else first
        shift = networks.meter(batch)
        before = networks.model(batch.clone())
        if networks.reporting is None or monitor is None:
            after, p = networks.plain(batch.clone()), torch.full((len(batch),), torch.nan, device="cpu")
            score = -shift.activation_rank.mean(dim=1)
        else:
            after, report = networks.reporting(batch.clone())
            p = report["p"].cpu()
            # Many images share the smallest p-value; among them, those that deviate more come first.
            score = p - 1e-6 * shift.evidence.nan_to_num(1e6).clamp(max=1e3).mean(dim=1)
        pair = _both_answers(before, after) if comparable else None
        comparable = pair is not None
        if pair is not None:
            answers.append(pair)
            changed = pair[0] != pair[1]
        if monitor is not None:
            monitor.update(report, changed=changed if comparable else None)
        p_values.append(p)
        shifts.append(shift)
        kept += [(float(s), seen + k, batch[k].cpu()) for k, s in enumerate(score)]
        kept = sorted(kept, key=lambda item: item[:2])[:most]
        seen += len(batch)
    if first is None:
        raise ValueError(f"{name}: there are no images")
    p = torch.cat(p_values)
    evidence = torch.cat([shift.evidence for shift in shifts])
    both = (torch.cat([a for a, _ in answers]), torch.cat([b for _, b in answers])) if comparable else None
    shown = []
    for _, number, image in kept:
        own = {n: float(e) for n, e in zip(shifts[0].norms, evidence[number], strict=True)}
        top = dict(sorted(own.items(), key=lambda item: -item[1])[:3])
        said = (None, None) if both is None else (int(both[0][number]), int(both[1][number]))
        called = f"image {number + 1}" if image_names is None else image_names[number]
        shown.append(Shown(number, called, float(p[number]), thumbnail(image, _channel_limits(first)), top, *said))
    return SetFindings(
        name,
        seen,
        p,
        shifts[0].norms,
        evidence,
        shifts[0].activations,
        torch.cat([shift.activation_rank for shift in shifts]),
        both,
        None if monitor is None else monitor.snapshot(),
        shown,
        int((p <= _smallest(networks.reporting) * (1 + ROUNDING)).sum()),
    ), first


def _level(robust: Corrected) -> float:
    """p-value up to which an image counts as unusual: 1 %, or the smallest that the held-out images allow."""
    return max(0.01, _smallest(robust))


def _smallest(robust: Corrected | None) -> float:
    """The smallest p-value of a finite image."""
    return 1.0 / (getattr(getattr(robust, "_report", None), "clean_images", 0) + 1)


def _both_answers(before: Any, after: Any) -> tuple[Tensor, Tensor] | None:
    """Most likely classes before and after; None if the outputs are not one row of scores per image."""
    try:
        found = most_likely(before).cpu(), most_likely(after).cpu()
    except ValueError:
        return None
    return found if found[0].dim() == 1 else None


def _channel_limits(images: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each channel, as they are shown in thumbnails."""
    flat = images.float().cpu().transpose(0, 1).flatten(1) if images.dim() > 2 else images.float().cpu().flatten()[None]
    finite = torch.where(flat.isfinite(), flat, flat[flat.isfinite()].median() if flat.isfinite().any() else 0.0)
    return finite.min(dim=1).values, finite.max(dim=1).values


def _measured_cost(networks: _Networks, batch: Tensor) -> Cost:
    """Median time of a few passes. The networks take turns, so that a busy moment affects all alike."""
    works: dict[str, nn.Module] = {"model": networks.model, "corrected": networks.plain}
    if networks.reporting is not None:
        works["reported"] = networks.reporting
    seconds: dict[str, list[float]] = {name: [] for name in works}
    began = time.perf_counter()
    while not seconds["model"] or (len(seconds["model"]) < 15 and time.perf_counter() - began < 1):
        for name, network in works.items():
            seconds[name].append(_timed(lambda network=network: network(batch.clone()), batch.device))  # type: ignore[misc]
    ms = {name: 1000 * statistics.median(some) / len(batch) for name, some in seconds.items()}
    return Cost(len(batch), ms["model"], ms["corrected"], ms.get("reported"), _machine(batch.device))


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    with torch.inference_mode():
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    kind = platform.machine() or "CPU"
    threads = torch.get_num_threads()
    used = f"{threads} thread{'s' if threads > 1 else ''} on {os.cpu_count()} cores"
    return f"{kind}, {used}, torch {torch.__version__}"
