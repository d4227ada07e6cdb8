"""Calibration of the subjects: once per subject, with targets kept in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from trueup import Targets, calibrate, sites
from trueup_lab.evaluation.sets import Benchmark
from trueup_lab.evaluation.subjects import Subject
from trueup_lab.processes import ALONE, Processes


def targets_of(
    subject: Subject,
    model: nn.Module,
    benchmark: Benchmark,
    count: int | None,
    *,
    folder: Path,
    batch: int,
    processes: Processes = ALONE,
    decide: bool = False,
) -> Targets:
    """Return the targets of a subject from `count` clean images (None: all).

    `model` is the subject's model on the benchmark's device. Targets are read from `folder` if an earlier call saved
    them there, unless an earlier version did, which lacked norms or the gate. Several processes calibrate on a part of
    the images each; all of them must call this, and all get the targets of all images. With `decide`, calibration
    also chooses a setting for the model.
    """
    decided = "-decided" if decide else ""
    aside = f"-every{benchmark.set_aside}" if benchmark.set_aside else ""
    path = folder / f"{subject.key}-{benchmark.calibration_count(count)}{aside}{decided}.trueup.safetensors"
    if path.exists():
        targets = Targets.load(path)
        if targets.gate or not sites(model, select=lambda site: site.kind == "norm"):
            return targets
    images = clean_images(subject, benchmark, count, batch=batch, processes=processes)
    targets = calibrate(model, images, decide=decide)
    if processes.rank == 0:
        targets.save(path)
    return targets


def clean_images(
    subject: Subject, benchmark: Benchmark, count: int | None, *, batch: int, processes: Processes = ALONE
) -> Iterator[Tensor]:
    """Yield this process's part of the clean images, normalised for the subject."""
    images = benchmark.calibration(count, batch=batch, part=(processes.rank, processes.world))
    return (subject.normalisation(part) for part in images)
