"""The workbench of a run: models on the device, their calibrations, and the test sets shown to them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from trueup import Corrected
from trueup_lab.devices import device_name
from trueup_lab.evaluation.calibration import StreamWatch, clean_images, targets_of
from trueup_lab.evaluation.clock import Clock
from trueup_lab.evaluation.jobs import Job, Pair, row_of, sequence_hash
from trueup_lab.evaluation.methods import Calibrating, Default, Forgetful, Network
from trueup_lab.evaluation.per_image import write_counts
from trueup_lab.evaluation.plan import Plan
from trueup_lab.evaluation.precision import measured_precision
from trueup_lab.evaluation.predict import Classified, Predictions, Segmented
from trueup_lab.evaluation.rows import EvaluationRow
from trueup_lab.evaluation.sets import Benchmark, Case, TestSet
from trueup_lab.evaluation.streams import order
from trueup_lab.evaluation.subjects import Subject
from trueup_lab.processes import Processes

# Pixel values per forward pass of a stateless method: enough to keep a GPU busy, few enough for a CPU's cache.
_PASS = {"cuda": 1 << 23, "cpu": 1 << 18}
_CHUNK = {"cuda": 1 << 31, "cpu": 1 << 28}  # bytes of images held at a time


class Workbench:
    """Models on the device, their calibrations, and the prepared networks, each made at its first use."""

    def __init__(self, plan: Plan, folder: Path, out: Path, pass_size: int | None, processes: Processes) -> None:
        self.plan, self.folder, self.out, self.pass_size, self.processes = plan, folder, out, pass_size, processes
        self._models: dict[str, nn.Module] = {}
        self._targets: dict[
            tuple[str, str] | str, object
        ] = {}  # of methods with their own calibration, and of subjects
        self._networks: dict[tuple[str, str], Network] = {}

    def run(self, job: Job, clock: Clock) -> Iterable[list[EvaluationRow] | None]:
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

    def _show(self, job: Job, sets: list[TestSet], clock: Clock) -> Iterable[tuple[Pair, Predictions] | None]:
        """Show the sets as one stream to every pair. Yield each pair that has seen all; None when time is up."""
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

    def _rows(self, job: Job, pair: Pair, sets: list[TestSet], seen: Predictions) -> list[EvaluationRow]:
        ms = 1000 * seen.seconds / seen.count
        ends = list(accumulate(len(test.labels) for test in sets))
        parts = [slice(end - len(test.labels), end) for test, end in zip(sets, ends, strict=True)]
        calibrated = job.benchmark.calibration_count(self.plan.calibrate) if pair.method.needs.targets else 0
        more = {"calibrated": calibrated, "sequence": sequence_hash(job.stages), "ms": ms}
        device = device_name(job.benchmark.device)
        rule = {"rule": _rule(self._network(job.benchmark, pair))} if pair.subject.dense else {}
        rows = [
            row_of(pair, self.plan, test, **more, seen=seen.columns(part) | rule, device=device)  # type: ignore[arg-type]
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

    def targets(self, benchmark: Benchmark, pair: Pair, watch: StreamWatch = lambda images: images) -> object:
        """Return the calibration that a method needs: its own kind, or the subject's targets."""
        own = isinstance(pair.method, Calibrating)
        key = pair.name if own else pair.subject.key
        if key not in self._targets:
            with measured_precision():
                self._targets[key] = self._calibrate(benchmark, pair, watch)
        return self._targets[key]

    def _calibrate(self, benchmark: Benchmark, pair: Pair, watch: StreamWatch) -> object:
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
            decide=any(isinstance(method, Default) for method in self.plan.methods),
            watch=watch,
        )

    def _network(self, benchmark: Benchmark, pair: Pair) -> Network:
        if pair.name not in self._networks:
            targets = self.targets(benchmark, pair) if pair.method.needs.targets else None
            self._networks[pair.name] = pair.method.prepare(self._model(benchmark, pair.subject), targets)
        return self._networks[pair.name]


def _rule(network: Network) -> str:
    """Return the rule of a corrected model, as text."""
    return repr(network.rule) if isinstance(network, Corrected) else ""


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
