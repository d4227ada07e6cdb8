"""Measure how well `trueup.measure` detects corrupted images, by corruption and severity.

    python benchmarks/detection.py results/models/resnet20-bn-cifar10.safetensors --data ROOT --seeds 0

For every test set, `separation` is the area under the ROC curve (in percent: 50 is chance, 100 is perfect) of
`Shift.image_rank` against clean test images, and `found` the share of images above rank 0.99, which should be 1 % on
clean images. All from one forward pass of the uncorrected model. Rows are appended to a CSV file, and none is measured
twice.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

import trueup
from of_models import options
from trueup_lab.evaluation import Benchmark, Subject, read_subjects
from trueup_lab.evaluation.calibration import targets_of
from trueup_lab.evaluation.metrics import separation
from trueup_lab.evaluation.precision import measured_precision
from trueup_lab.evaluation.sets import CLEAN, TestSet
from trueup_lab.tables import append_rows, number, start_table

LEVEL = 0.99
_KEY = attrgetter("key")


@dataclass(frozen=True, kw_only=True)
class DetectionRow:
    """One model and test set. `separation` and `found` are in percent."""

    model: str
    seed: int
    corruption: str
    severity: int
    images: int
    separation: float = number(".2f")
    found: float = number(".2f")
    data: str
    calibrated: int
    checkpoint: str
    torch: str
    device: str

    @property
    def key(self) -> tuple[object, ...]:
        """Everything but the results, the versions and the device."""
        named = (self.model, self.seed, self.corruption, self.severity, self.images)
        return *named, self.calibrated, self.checkpoint


def main() -> None:
    """Measure what is missing from the CSV file, and print it."""
    parser = options(__doc__, "results/detection.csv")
    parser.add_argument("--images", type=int, help="images per test set (default: all)")
    parser.add_argument("--severity", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    asked = parser.parse_args()
    for path in asked.models:
        for subject in read_subjects(path, asked.seeds):
            benchmark = Benchmark(subject.set, root=asked.data, images=asked.images, device=asked.device)
            with measured_precision():
                _detect(subject, benchmark, asked)


def _detect(subject: Subject, benchmark: Benchmark, asked: argparse.Namespace) -> None:
    calibrated = benchmark.calibration_count(asked.calibrate)
    sets = [benchmark.open(case) for case in benchmark.cases(asked.severity)]
    done = {row.key for row in start_table(asked.out, DetectionRow)}

    def row_of(test: TestSet, area: float = 0.0, found: float = 0.0) -> DetectionRow:
        return DetectionRow(
            model=subject.name,
            seed=subject.seed,
            corruption=test.case.corruption,
            severity=test.case.severity,
            images=len(test.labels),
            separation=area,
            found=found,
            data=test.origin,
            calibrated=calibrated,
            checkpoint=subject.checkpoint,
            torch=torch.__version__,
            device=asked.device,
        )

    if all(row_of(test).key in done for test in sets):
        return
    model = subject.model.to(asked.device)
    targets = targets_of(subject, model, benchmark, asked.calibrate, folder=asked.targets, batch=asked.batch)

    def unusual(test: TestSet) -> Tensor:
        parts = torch.arange(len(test.labels)).split(asked.batch)
        return torch.cat(
            [
                trueup.measure(model, targets, subject.normalisation(test.take(part)), select=_is_norm).image_rank
                for part in parts
            ]
        )

    clean = next(unusual(test) for test in sets if test.case.corruption == CLEAN)
    for test in sets:
        if row_of(test).key in done:
            continue
        ranks = clean if test.case.corruption == CLEAN else unusual(test)
        area, found = separation(clean, ranks), 100 * float((ranks > LEVEL).float().mean())
        append_rows(asked.out, [row_of(test, area, found)], key=_KEY)
        print(f"{subject.key}  {test.case.corruption:20} {test.case.severity}  {area:6.2f}  {found:6.2f}", flush=True)


def _is_norm(site: trueup.Site) -> bool:
    """Select norms: `Shift.image_rank` needs no more, and distances at activations would take most of the time."""
    return site.kind == "norm"


if __name__ == "__main__":
    main()
