"""Calibration of the subjects: once per subject, with targets kept in a folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor, nn

from trueup import Targets, __version__, calibrate
from trueup_lab.evaluation.sets import Benchmark
from trueup_lab.evaluation.subjects import Subject
from trueup_lab.processes import ALONE, Processes

StreamWatch = Callable[[Iterator[Tensor]], Iterator[Tensor]]
"""Passes images on, and may report or stop between them."""


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
    watch: StreamWatch = lambda images: images,
) -> Targets:
    """Return the targets of a subject from `count` clean images (None: all).

    `model` is the subject's model on the benchmark's device. Targets are read from `folder` if an earlier call of
    this version of trueup saved them there undamaged. Several processes calibrate on a part of
    the images each; all of them must call this, and all get the targets of all images. With `decide`, calibration
    also chooses a setting for the model.
    """
    decided = "-decided" if decide else ""
    aside = f"-every{benchmark.set_aside}" if benchmark.set_aside else ""
    name = f"{subject.key}-{benchmark.calibration_count(count)}{aside}{decided}-{__version__}"
    path = folder / f"{name}.trueup.safetensors"
    if path.exists():
        try:
            return Targets.load(path)
        except ValueError as error:
            warnings.warn(f"{error}; calibrating once more", stacklevel=2)
    images = clean_images(subject, benchmark, count, batch=batch, processes=processes)
    targets = calibrate(model, watch(images), decide=decide)
    if processes.rank == 0:
        targets.save(path)
    return targets


def clean_images(
    subject: Subject, benchmark: Benchmark, count: int | None, *, batch: int, processes: Processes = ALONE
) -> Iterator[Tensor]:
    """Yield this process's part of the clean images, normalised for the subject."""
    images = benchmark.calibration(count, batch=batch, part=(processes.rank, processes.world))
    return (subject.normalisation(part) for part in images)
