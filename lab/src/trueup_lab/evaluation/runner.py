"""The runner: measures models x methods x test sets, and appends a row for each that is missing.

The outer loops are the expensive ones: a corrupted set is made once and shown to all models and methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

from torch import Tensor

from trueup_lab.evaluation.clock import Clock
from trueup_lab.evaluation.jobs import Job, jobs_left, row_kind
from trueup_lab.evaluation.plan import EvaluationProgress, Outcome, Plan
from trueup_lab.evaluation.sets import Benchmark
from trueup_lab.evaluation.subjects import Subject
from trueup_lab.evaluation.workbench import Workbench
from trueup_lab.processes import ALONE, Processes
from trueup_lab.tables import append_rows, read_table, start_table

_KEY = attrgetter("key")


def evaluate(
    subjects: Sequence[Subject],
    plan: Plan,
    out: str | Path,
    *,
    root: str | Path | None = None,
    device: str = "cpu",
    targets: str | Path = "runs/targets",
    time_limit: float | None = None,
    pass_size: int | None = None,
    processes: Processes = ALONE,
    report: Callable[[EvaluationProgress], None] = lambda _: None,
) -> Outcome:
    """Measure what is missing from the CSV file `out`. The outcome is true if the plan is complete now.

    Rows are appended as they are measured, so a killed run continues where it stopped, and several runs may share the
    file. With a `time_limit` in seconds the run stops between two passes when another might not fit; a calibration
    that is longer than the limit is an error. Methods that a model does not support (no batch norm) are left out; if
    none is left, that is an error. `pass_size` is the number of images per forward pass of stateless methods; it
    changes only the speed. `targets` is the folder for calibrations. Under torchrun, pass each process its `processes`:
    they share the test sets, and the rows are the same.

    Models for segmentation give rows of `SegmentationRow`, and counts per image in a folder beside `out`
    (`trueup_lab.evaluation.per_image`). They need a file of their own.
    """
    kind = row_kind(subjects)
    left_out = [
        (subject.name, method.name) for subject in subjects for method in plan.methods if not subject.takes(method)
    ]
    if len(left_out) == len(subjects) * len(plan.methods):
        reasons = "; ".join(f"{model} has no batch norm, which {method} needs" for model, method in left_out)
        raise ValueError(f"nothing to measure: {reasons or 'no model is chosen'}")
    if processes.rank == 0:
        start_table(out, kind)
    processes.wait()
    done = {row.key for row in read_table(out, kind)}
    processes.wait()  # no process appends before all have read
    clock = Clock(time_limit)
    benchmarks = {
        name: Benchmark(
            name,
            root=root,
            images=plan.images,
            seed=plan.seed,
            origin=plan.origin,
            device=device,
            set_aside=plan.set_aside,
        )
        for name in dict.fromkeys(subject.set for subject in subjects)
    }
    wanted: set[tuple[object, ...]] = set()
    work = [
        Job(benchmark, stages, pairs)
        for benchmark in benchmarks.values()
        for stages, pairs in jobs_left(benchmark, subjects, plan, done, wanted)
    ]
    bench = Workbench(plan, Path(targets), Path(out), pass_size, processes)
    passes = sum(len(job.pairs) for job in work)

    def tell(what: str) -> None:
        report(EvaluationProgress(0, passes, clock.elapsed, what))

    def outcome(complete: bool) -> Outcome:
        found = {row.key: row for row in reversed(read_table(out, kind)) if row.key in wanted}
        return Outcome(complete, list(reversed(found.values())), left_out)

    if work:
        images = sum(
            len(job.pairs) * len(stage) * len(job.benchmark.image_numbers) for job in work for stage in job.stages
        )
        tell(f"{passes} passes to do, over {images} images in all")
    for pair, benchmark in {
        pair: job.benchmark for job in work for pair in job.pairs if pair.method.needs.targets
    }.items():
        if processes.any(clock.stops("calibration")):
            return outcome(complete=False)
        with clock.timing("calibration"):
            count = benchmark.calibration_count(plan.calibrate)
            bench.targets(benchmark, pair, partial(_watched, pair.subject.name, count, clock, tell, processes))
    mine = [job for number, job in enumerate(work) if processes.mine(number)]
    return outcome(complete=not processes.any(not _work_off(mine, bench, clock, out, report)))


def _watched(
    model: str,
    count: int,
    clock: Clock,
    tell: Callable[[str], None],
    processes: Processes,
    images: Iterator[Tensor],
) -> Iterator[Tensor]:
    """Yield the images of a calibration, report its progress, and stop it at the time limit."""
    began, seen = time.monotonic(), 0
    tell(f"calibrating {model} on {count} images")
    for batch in images:
        # Several processes calibrate together: one that stopped would leave the others waiting.
        if seen and processes.world == 1 and clock.stops():
            needed = (time.monotonic() - began) * count / seen
            raise ValueError(
                f"the time limit of {clock.limit:g} s ended the calibration of {model} after {seen} of {count} images, "
                f"and it cannot be continued; it takes about {needed:.0f} s: give it more time, or fewer images"
            )
        yield batch
        seen += len(batch) * processes.world
        tell(f"calibrating {model}: {min(seen, count)} of {count} images")


def _work_off(
    jobs: list[Job], bench: Workbench, clock: Clock, out: str | Path, report: Callable[[EvaluationProgress], None]
) -> bool:
    """Do the jobs and append their rows. Return whether all were done in time."""
    total, finished = sum(len(job.pairs) for job in jobs), 0
    for job in jobs:
        for rows in bench.run(job, clock):
            if rows is None:
                return False
            append_rows(out, rows, key=_KEY)
            finished += 1
            last = rows[-1]
            what = f"{last.model} {last.seed}, {last.method}, {last.corruption} {last.severity}"
            report(EvaluationProgress(finished, total, clock.elapsed, what))
    return True
