"""The subjects' targets: calibrated once, kept in a folder."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from trueup import Targets, calibrate, sites
from trueup_lab.evaluation.processes import Processes
from trueup_lab.evaluation.sets import Benchmark
from trueup_lab.evaluation.subjects import Subject


def targets_of(
    subject: Subject,
    model: nn.Module,
    benchmark: Benchmark,
    count: int | None,
    *,
    folder: Path,
    batch: int,
    processes: Processes,
) -> Targets:
    """The targets of a subject, whose `model` is on the benchmark's device, from `count` clean images.

    Read from `folder` where an earlier call left them, unless an earlier version did, which left out norms or the
    gate. Many processes calibrate on a part of the images each; all get the targets of all, and all must call this.
    """
    path = folder / f"{subject.key}-{benchmark.calibration_count(count)}.trueup.safetensors"
    if path.exists():
        targets = Targets.load(path)
        if targets.gate or not sites(model, kind="norm"):
            return targets
    images = benchmark.calibration(count, batch=batch, part=(processes.rank, processes.world))
    targets = calibrate(model, (subject.normalisation(part) for part in images))
    if processes.rank == 0:
        targets.save(path)
    return targets
