"""The paper's figures by name: compute the contents and draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import trueup
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.sets import SETS
from trueup_lab.evaluation import Subject, read_rows, read_subjects
from trueup_lab.experiments import Experiment, cells, rows_file
from trueup_lab.experiments.activations import activation_maps, before_and_after, most_dissimilar, stationarity
from trueup_lab.experiments.sources import source
from trueup_lab.experiments.specs import PAPERS
from trueup_lab.figures.activations import draw_before_and_after, draw_dissimilar, draw_maps, draw_stationarity
from trueup_lab.figures.curves import draw_iterations, draw_severities
from trueup_lab.figures.gains import draw_gains
from trueup_lab.tables import number, write_table

SAMPLE = 1  # the test image of Figures 1 and 2
ENOUGH = 5000  # images for figures of means and distributions


@dataclass(frozen=True)
class MapRow:
    """Means over one map of Figure 1."""

    image: str
    layer: int
    mean_uncorrected: float = number(".5g")
    mean_corrected: float = number(".5g")
    mean_absolute_difference: float = number(".5g")


@dataclass(frozen=True)
class QuantileRow:
    """Quantiles of the distributions in Figure 2."""

    level: float = number(".5g")
    before: float = number(".5g")
    after: float = number(".5g")
    target: float = number(".5g")


@dataclass(frozen=True)
class OrderStatisticRow:
    """One order statistic of Figure 7: its mean and standard deviation over images."""

    norm: str
    rank: int
    target: float = number(".5g")
    spread: float = number(".5g")


@dataclass(frozen=True)
class DistanceRow:
    """Distance between two images of Figure 8."""

    image: int
    other: int
    distance: float = number(".5g")


def draw(experiment: Experiment, results: Path, *, root: Path | None = None, images: int | None = None) -> list[Path]:
    """Draw a figure into `results/figures` and return the files written; none if its data are missing.

    `images` limits the number of images for figures of activations.
    """
    path = results / "figures" / f"{experiment.name}.png"
    if experiment.rows == "picture":
        subjects = [
            read_subjects(found)[0]
            for norm in experiment.norms
            if (found := source(experiment.set, norm).find(results, root)).is_file()
        ]
        return _PICTURES[experiment.name](subjects, path, root, images or ENOUGH) if subjects else []
    if experiment.rows not in ("severity", "curve", "paired"):
        return []
    rows = read_rows(rows_file(results, experiment.set))
    if experiment.rows == "paired":
        drawn = draw_gains(experiment, rows, path)
        return [] if drawn is None else [drawn]
    ours = cells(experiment, rows)
    if not ours:
        return []
    return [(draw_severities if experiment.rows == "severity" else draw_iterations)(experiment, ours, path)]


def _maps(subjects: Sequence[Subject], path: Path, root: Path | None, images: int) -> list[Path]:
    subject, correction = subjects[0], PAPERS["mnist"]["bn"]
    targets = trueup.calibrate(subject.model, _batches(subject, "train", root, images), decide=False)
    clean = SETS["mnist"].load("test", root).images[SAMPLE : SAMPLE + 1]
    shown = {"clean": clean} | {
        name.replace("_", " "): corrupt(clean, name, family="mnist-c", indices=[SAMPLE], root=root)
        for name in ("impulse_noise", "brightness")
    }
    maps = {
        name: activation_maps(subject.model, targets, correction, subject.normalisation(pixels)[0])
        for name, pixels in shown.items()
    }
    table = [
        MapRow(name, layer, float(plain.mean()), float(corrected.mean()), float((corrected - plain).abs().mean()))
        for name, one in maps.items()
        for layer, (plain, corrected) in enumerate(zip(one.plain, one.corrected, strict=True), start=1)
    ]
    write_table(path.with_suffix(".csv"), MapRow, table)
    return [draw_maps(maps, path), path.with_suffix(".csv")]


def _before_and_after(subjects: Sequence[Subject], path: Path, root: Path | None, images: int) -> list[Path]:
    subject, correction = subjects[0], PAPERS["mnist"]["bn"]
    targets = trueup.calibrate(subject.model, _batches(subject, "train", root, images), decide=False)
    clean = SETS["mnist"].load("test", root).images[SAMPLE : SAMPLE + 1]
    noisy = corrupt(clean, "impulse_noise", family="mnist-c", indices=[SAMPLE], root=root)
    data = before_and_after(subject.model, targets, correction, subject.normalisation(noisy)[0])
    levels = torch.linspace(0, 1, 257)
    columns = [torch.quantile(values.flatten(), levels) for values in (data.before, data.after, data.target)]
    table = [QuantileRow(*values) for values in torch.stack([levels, *columns], dim=1).tolist()]
    write_table(path.with_suffix(".csv"), QuantileRow, table)
    return [draw_before_and_after(data, path), path.with_suffix(".csv")]


def _stationarity(subjects: Sequence[Subject], path: Path, root: Path | None, images: int) -> list[Path]:
    by_norm = {s.norm: stationarity(s.model, "bn1", _batches(s, "train", root, images)) for s in subjects}
    table = []
    for norm, one in by_norm.items():
        few = torch.linspace(0, len(one.mean) - 1, 257).long()
        table += [OrderStatisticRow(norm, int(k), float(one.mean[k]), float(one.spread[k])) for k in few]
    write_table(path.with_suffix(".csv"), OrderStatisticRow, table)
    return [draw_stationarity(by_norm, path), path.with_suffix(".csv")]


def _dissimilar(subjects: Sequence[Subject], path: Path, root: Path | None, images: int) -> list[Path]:
    subject = subjects[0]
    data = most_dissimilar(subject.model, "bn1", _batches(subject, "test", root, images))
    farthest = data.distance.argsort(descending=True)[:20].tolist()
    table = [DistanceRow(data.first, other, float(data.distance[other])) for other in farthest]
    write_table(path.with_suffix(".csv"), DistanceRow, table)
    return [draw_dissimilar(data, path), path.with_suffix(".csv")]


_PICTURES: dict[str, Callable[[Sequence[Subject], Path, Path | None, int], list[Path]]] = {
    "figure1": _maps,
    "figure2": _before_and_after,
    "figure7": _stationarity,
    "figure8": _dissimilar,
}


def _batches(subject: Subject, split: str, root: Path | None, images: int) -> Iterator[Tensor]:
    """Yield the first `images` of a split, normalised for the subject."""
    pixels = SETS[subject.set].load(split, root).images[:images]
    return (subject.normalisation(part) for part in torch.split(pixels, 250))
