"""The runner: measures models x methods x test sets and appends a row for each, never twice.

The outer loops are the expensive ones: a corrupted set is made once and shown to all models and methods.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from trueup import Corrected, __version__
from trueup_lab.data.corrupted_sets import Origin
from trueup_lab.devices import device_name
from trueup_lab.evaluation.calibration import Watch, clean_images, targets_of
from trueup_lab.evaluation.methods import Calibrating, Default, Forgetful, Method, Network, is_continual
from trueup_lab.evaluation.per_image import write_counts
from trueup_lab.evaluation.precision import measured_precision
from trueup_lab.evaluation.predict import Classified, Predictions, Segmented
from trueup_lab.evaluation.rows import EvaluationRow, SegmentationRow
from trueup_lab.evaluation.sets import Benchmark, Case, TestSet
from trueup_lab.evaluation.streams import Stream, check_stream, order
from trueup_lab.evaluation.subjects import Subject
from trueup_lab.processes import ALONE, Processes
from trueup_lab.tables import append_rows, read_table, start_table

# Pixel values per forward pass of a stateless method: enough to keep a GPU busy, few enough for a CPU's cache.
_PASS = {"cuda": 1 << 23, "cpu": 1 << 18}
_KEY = attrgetter("key")
_CHUNK = {"cuda": 1 << 31, "cpu": 1 << 28}  # bytes of images held at a time


@dataclass(frozen=True)
class Plan:
    """What to measure.

    `only` selects corruptions; `batch` is the batch size of methods that depend on it. `images` limits the test sets
    and `calibrate` the clean images for calibration; None means all. For segmentation, `set_aside` k calibrates on
    every k-th test image, without its labels, and tests on the others; 0 calibrates on training images.
    """

    methods: tuple[Method, ...]
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    only: tuple[str, ...] = ()
    stream: Stream = "corruption"
    batch: int = 200
    images: int | None = None
    calibrate: int | None = None
    seed: int = 0
    origin: Origin | None = None
    set_aside: int = 0

    def __post_init__(self) -> None:
        check_stream(self.stream)
        for name, count in (("batch", self.batch), ("images", self.images), ("calibrate", self.calibrate)):
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: expected at least one image")
        if self.origin not in (None, *get_args(Origin)):
            raise ValueError(f"origin={self.origin!r}: expected one of {', '.join(get_args(Origin))}")
        if not self.severities or not set(self.severities) <= {1, 2, 3, 4, 5}:
            raise ValueError(f"severities={self.severities}: expected some of 1, 2, 3, 4, 5")
        if not self.methods:
            raise ValueError("methods=(): expected at least one method")
        names = [method.name for method in self.methods]
        if len(set(names)) != len(names):
            raise ValueError(f"methods={', '.join(names)}: two have the same name; leave one out")


@dataclass(frozen=True)
class EvaluationProgress:
    """Progress of a run, in passes of one model and method over one or more test sets."""

    done: int
    total: int
    seconds: float
    what: str

    @property
    def left(self) -> float:
        """Estimated seconds left; 0 before the first pass is done."""
        return self.seconds / self.done * (self.total - self.done) if self.done else 0.0


@dataclass(frozen=True)
class Outcome:
    """What a run came to: whether its plan is complete, and the plan's rows, measured now or before.

    It is true if the plan is complete. `left_out` pairs models with methods that they do not support.
    """

    complete: bool
    rows: list[EvaluationRow]
    left_out: list[tuple[str, str]]

    def __bool__(self) -> bool:
        return self.complete


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
    clock = _Clock(time_limit)
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
        _Job(benchmark, stages, pairs)
        for benchmark in benchmarks.values()
        for stages, pairs in _jobs(benchmark, subjects, plan, done, wanted)
    ]
    bench = _Workbench(plan, Path(targets), Path(out), pass_size, processes)
    passes = sum(len(job.pairs) for job in work)

    def tell(what: str) -> None:
        report(EvaluationProgress(0, passes, clock.elapsed, what))

    def outcome(complete: bool) -> Outcome:
        found = {row.key: row for row in reversed(read_table(out, kind)) if row.key in wanted}
        return Outcome(complete, list(reversed(found.values())), left_out)

    if work:
        images = sum(len(job.pairs) * len(stage) * len(job.benchmark.numbers) for job in work for stage in job.stages)
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
    clock: _Clock,
    tell: Callable[[str], None],
    processes: Processes,
    images: Iterator[Tensor],
) -> Iterator[Tensor]:
    """Yield the images of a calibration, tell how far it is, and stop it at the time limit."""
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


def row_kind(subjects: Sequence[Subject]) -> type[EvaluationRow]:
    """Return the kind of rows that these subjects give."""
    kinds = {SegmentationRow if subject.dense else EvaluationRow for subject in subjects}
    if len(kinds) > 1:
        raise ValueError("models for classification and for segmentation have different columns; evaluate them apart")
    return kinds.pop() if kinds else EvaluationRow


def _work_off(
    jobs: list[_Job], bench: _Workbench, clock: _Clock, out: str | Path, report: Callable[[EvaluationProgress], None]
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


@dataclass(frozen=True)
class _Pair:
    subject: Subject
    method: Method

    @property
    def name(self) -> tuple[str, str]:
        return self.subject.key, self.method.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pair) and self.name == other.name


@dataclass(frozen=True)
class _Job:
    """Stages of test sets, each shown as one stream to each pair.

    A continual method gets all stages in one job, since its answers depend on all stages before; for other methods a
    job has one stage.
    """

    benchmark: Benchmark
    stages: list[list[Case]]
    pairs: list[_Pair]


def _jobs(
    benchmark: Benchmark,
    subjects: Iterable[Subject],
    plan: Plan,
    done: set[tuple[object, ...]],
    wanted: set[tuple[object, ...]],
) -> list[tuple[list[list[Case]], list[_Pair]]]:
    """Return the jobs that are left, in order. The keys of all rows of the plan are added to `wanted`."""
    cases = benchmark.cases(plan.severities, plan.only)
    stages = benchmark.groups(cases) if plan.stream == "mixed" else [[case] for case in cases]
    pairs = [
        _Pair(subject, method)
        for subject in subjects
        if subject.set == benchmark.name
        for method in plan.methods
        if subject.takes(method)
    ]
    calibrated = benchmark.calibration_count(plan.calibrate) if any(p.method.needs.targets for p in pairs) else 0

    opened = [[benchmark.open(case) for case in stage] for stage in stages]

    keys = {
        (pair, number): {_row(pair, plan, test, calibrated=calibrated, sequence=_digest(stages)).key for test in sets}
        for pair in pairs
        for number, sets in enumerate(opened)
    }
    wanted.update(*keys.values())

    def missing(pair: _Pair, number: int) -> bool:
        return not keys[pair, number] <= done

    forgetful = [pair for pair in pairs if not is_continual(pair.method)]
    left = [[pair for pair in forgetful if missing(pair, number)] for number in range(len(stages))]
    unfinished = [p for p in pairs if is_continual(p.method) and any(missing(p, k) for k in range(len(stages)))]
    return [
        *(([stage], waiting) for stage, waiting in zip(stages, left, strict=True) if waiting),
        *((stages, [pair]) for pair in unfinished),
    ]


def _row(
    pair: _Pair,
    plan: Plan,
    test: TestSet,
    *,
    calibrated: int,
    sequence: str,
    seen: Mapping[str, Any] | None = None,
    ms: float = 0.0,
    device: str = "",
) -> EvaluationRow:
    """Return the row of a pair and test set. Without `seen`, the columns of results, only its key is valid."""
    needs, subject = pair.method.needs, pair.subject
    dense = {"mean_iou": 0.0, "iou": "", "set_aside": plan.set_aside, "rule": ""} if subject.dense else {}
    results = {"accuracy": 0.0, "calibration_error": 0.0, **dense, **(seen or {})}
    return (SegmentationRow if subject.dense else EvaluationRow)(
        model=subject.name,
        seed=subject.seed,
        method=pair.method.name,
        stream="any" if needs.stateless else plan.stream + (f"/{sequence}" if is_continual(pair.method) else ""),
        batch=0 if needs.stateless else 1 if plan.stream == "single" else plan.batch,
        corruption=test.case.corruption,
        severity=test.case.severity,
        images=len(test.labels),
        ms=float(f"{ms:.4g}"),
        data=test.origin,
        data_seed=plan.seed if test.origin.startswith("generated") else 0,
        calibrated=calibrated if needs.targets else 0,
        needs=str(needs),
        checkpoint=subject.checkpoint,
        trueup=__version__,
        torch=torch.__version__,
        device=device,
        **results,
    )


class _Workbench:
    """Models on the device, their calibrations, and the prepared networks, each made when first needed."""

    def __init__(self, plan: Plan, folder: Path, out: Path, pass_size: int | None, processes: Processes) -> None:
        self.plan, self.folder, self.out, self.pass_size, self.processes = plan, folder, out, pass_size, processes
        self._models: dict[str, nn.Module] = {}
        self._targets: dict[tuple[str, str], object] = {}
        self._networks: dict[tuple[str, str], Network] = {}

    def run(self, job: _Job, clock: _Clock) -> Iterable[list[EvaluationRow] | None]:
        """Yield the rows of each pair, of all stages at once; yield None and stop when time is up."""
        rows: dict[tuple[str, str], list[EvaluationRow]] = {pair.name: [] for pair in job.pairs}
        for pair in job.pairs:
            if pair.method.needs.memory and isinstance(network := self._network(job.benchmark, pair), Forgetful):
                network.reset()
        for number, stage in enumerate(job.stages):
            sets = [job.benchmark.open(case) for case in stage]
            for shown in self._show(job, sets, clock):
                if shown is None:
                    yield None
                    return
                pair, seen = shown
                rows[pair.name] += self._rows(job, pair, sets, seen)
                if number == len(job.stages) - 1:
                    yield rows[pair.name]

    def _show(self, job: _Job, sets: list[TestSet], clock: _Clock) -> Iterable[tuple[_Pair, Predictions] | None]:
        """Show the sets as one stream to every pair. Yield a pair when it has seen all, or None when time is up."""
        device = job.benchmark.device
        labels = torch.cat([test.labels for test in sets])
        classes = job.benchmark.classes
        kinds = labels if classes is None else torch.arange(len(labels))
        arriving = order(self.plan.stream, kinds, seed=self.plan.seed)
        seen: dict[tuple[str, str], Predictions] = {
            pair.name: Classified(len(labels), device) if classes is None else Segmented(len(labels), device, classes)
            for pair in job.pairs
        }
        chunks = torch.split(arriving, self._chunk(job.benchmark))
        for number, chunk in enumerate(chunks):
            if clock.stops("images", "pass"):
                yield None
                return
            with clock.timing("images"):
                images = _take(sets, chunk)
            positions, truth = chunk.to(device), labels[chunk].to(device)
            for pair in job.pairs:
                if clock.stops("pass"):
                    yield None
                    return
                network = self._network(job.benchmark, pair)
                needs = pair.method.needs
                size = self._pass_size(images) if needs.stateless else self._batch
                with measured_precision(), clock.timing("pass"):
                    seen[pair.name].add(
                        network,
                        images,
                        truth,
                        positions,
                        normalisation=pair.subject.normalisation,
                        batch=size,
                        gradients=needs.gradients,
                    )
                if number == len(chunks) - 1:
                    yield pair, seen[pair.name]

    def _rows(self, job: _Job, pair: _Pair, sets: list[TestSet], seen: Predictions) -> list[EvaluationRow]:
        ms = 1000 * seen.seconds / seen.count
        ends = list(accumulate(len(test.labels) for test in sets))
        parts = [slice(end - len(test.labels), end) for test, end in zip(sets, ends, strict=True)]
        calibrated = job.benchmark.calibration_count(self.plan.calibrate) if pair.method.needs.targets else 0
        more = {"calibrated": calibrated, "sequence": _digest(job.stages), "ms": ms}
        device = device_name(job.benchmark.device)
        rule = {"rule": _rule(self._network(job.benchmark, pair))} if pair.subject.dense else {}
        rows = [
            _row(pair, self.plan, test, **more, seen=seen.columns(part) | rule, device=device)  # type: ignore[arg-type]
            for test, part in zip(sets, parts, strict=True)
        ]
        for row, part in zip(rows, parts, strict=True):
            if counts := seen.per_image(part):
                write_counts(self.out, row, counts)
        return rows

    @property
    def _batch(self) -> int:
        return 1 if self.plan.stream == "single" else self.plan.batch

    def _chunk(self, benchmark: Benchmark) -> int:
        """Number of images to hold at a time, in whole batches."""
        held = _CHUNK["cpu" if benchmark.device.type == "cpu" else "cuda"]
        return max(1, held // benchmark.image_bytes // self._batch) * self._batch

    def _pass_size(self, images: Tensor) -> int:
        return self.pass_size or max(8, _PASS["cpu" if images.device.type == "cpu" else "cuda"] // images[0].numel())

    def _model(self, benchmark: Benchmark, subject: Subject) -> nn.Module:
        if subject.key not in self._models:
            self._models[subject.key] = copy.deepcopy(subject.model).eval().to(benchmark.device)
        return self._models[subject.key]

    def targets(self, benchmark: Benchmark, pair: _Pair, watch: Watch = lambda images: images) -> object:
        """Return the calibration that a method needs: its own kind, or the subject's targets."""
        own = isinstance(pair.method, Calibrating)
        key = pair.name if own else (pair.subject.key, "decided" if isinstance(pair.method, Default) else "")
        if key not in self._targets:
            with measured_precision():
                self._targets[key] = self._calibrate(benchmark, pair, watch)
        return self._targets[key]

    def _calibrate(self, benchmark: Benchmark, pair: _Pair, watch: Watch) -> object:
        subject, count = pair.subject, self.plan.calibrate
        model = self._model(benchmark, subject)
        batch = self._pass_size(benchmark.open(Case("identity", 0)).take(torch.tensor([0])))
        if isinstance(pair.method, Calibrating):
            return pair.method.calibrate(model, watch(clean_images(subject, benchmark, count, batch=batch)))
        return targets_of(
            subject,
            model,
            benchmark,
            count,
            folder=self.folder,
            batch=batch,
            processes=self.processes,
            decide=isinstance(pair.method, Default),
            watch=watch,
        )

    def _network(self, benchmark: Benchmark, pair: _Pair) -> Network:
        if pair.name not in self._networks:
            targets = self.targets(benchmark, pair) if pair.method.needs.targets else None
            self._networks[pair.name] = pair.method.prepare(self._model(benchmark, pair.subject), targets)
        return self._networks[pair.name]


def _rule(network: Network) -> str:
    """Return the rule of a corrected model, as text."""
    return repr(network.rule) if isinstance(network, Corrected) else ""


def _digest(stages: list[list[Case]]) -> str:
    """Return a short hash of a sequence of test sets."""
    return hashlib.blake2b(repr(stages).encode(), digest_size=2).hexdigest()


def _take(sets: list[TestSet], flat: Tensor) -> Tensor:
    """Return the images at positions `flat` of the concatenated sets."""
    if len(sets) == 1:
        return sets[0].take(flat)
    first, images = 0, None
    for test in sets:
        here = ((flat >= first) & (flat < first + len(test.labels))).nonzero().flatten()
        part = test.take(flat[here] - first)
        images = part.new_empty((len(flat), *part.shape[1:])) if images is None else images
        images[here.to(part.device)] = part
        first += len(test.labels)
    assert images is not None
    return images


class _Clock:
    """Time limit: stops when another piece, as slow as the slowest so far, might not fit."""

    def __init__(self, limit: float | None) -> None:
        self.began, self.limit = time.monotonic(), limit
        self.slowest: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def stops(self, *kinds: str) -> bool:
        ahead = sum(self.slowest.get(kind, 0.0) for kind in kinds)
        # 30 % more, since the next piece may be slower.
        return self.limit is not None and self.elapsed + 1.3 * ahead > self.limit

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.slowest[kind] = max(self.slowest.get(kind, 0.0), time.monotonic() - began)
