"""How well corrupted images are found: the area under the ROC curve of `trueup.measure`, by corruption and severity.

    python benchmarks/detection.py results/models/resnet20-bn-cifar10.safetensors --data ROOT --seeds 0

For every test set: the separation of its images from the clean test images by `Shift.image` (50 is chance, 100 is
perfect), and the share of them beyond the 1 % level, `found`; on the clean set itself that should be 1 %. All from one
forward pass, of the uncorrected model. Rows are appended to a CSV as they come, and none is made twice.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor

import trueup
from of_models import append, options
from trueup_lab.evaluation import Benchmark, Subject, read_subjects
from trueup_lab.evaluation.calibration import targets_of
from trueup_lab.evaluation.metrics import separation
from trueup_lab.evaluation.precision import measured_precision
from trueup_lab.evaluation.sets import CLEAN, TestSet
from trueup_lab.processes import ALONE

FIELDS = (
    *("model", "seed", "corruption", "severity", "images", "separation", "found"),
    *("data", "calibrated", "checkpoint", "torch", "device"),
)
LEVEL = 0.99


def main() -> None:
    """Measure what is missing from the CSV, and print it."""
    parser = options(__doc__, "results/detection.csv")
    parser.add_argument("--images", type=int, help="of each test set; all if not given")
    parser.add_argument("--severity", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    asked = parser.parse_args()
    for path in asked.models:
        for subject in read_subjects(path, asked.seeds):
            benchmark = Benchmark(subject.set, root=asked.data, images=asked.images, device=asked.device)
            with measured_precision():
                _detect(subject, benchmark, asked)


def _detect(subject: Subject, benchmark: Benchmark, asked: argparse.Namespace) -> None:
    calibrated = benchmark.calibration_count(asked.calibrate)
    facts = (calibrated, subject.checkpoint, torch.__version__, asked.device)
    sets = [benchmark.open(case) for case in benchmark.cases(asked.severity)]
    done = {(*row[:5], row[8], row[9]) for row in _read(asked.out)}

    def key(test: TestSet) -> tuple[str, ...]:
        named = (subject.name, subject.seed, test.case.corruption, test.case.severity, len(test.labels))
        return tuple(map(str, (*named, calibrated, subject.checkpoint)))

    if all(key(test) in done for test in sets):
        return
    model = subject.model.to(asked.device)
    targets = targets_of(
        subject, model, benchmark, asked.calibrate, folder=asked.targets, batch=asked.batch, processes=ALONE
    )

    def unusual(test: TestSet) -> Tensor:
        parts = torch.arange(len(test.labels)).split(asked.batch)
        return torch.cat(
            [
                trueup.measure(model, targets, subject.normalisation(test.take(part)), select=_is_norm).image
                for part in parts
            ]
        )

    clean = next(unusual(test) for test in sets if test.case.corruption == CLEAN)
    for test in sets:
        if key(test) in done:
            continue
        ranks = clean if test.case.corruption == CLEAN else unusual(test)
        area, found = separation(clean, ranks), 100 * float((ranks > LEVEL).float().mean())
        row = (*key(test)[:5], f"{area:.2f}", f"{found:.2f}", test.origin, *facts)
        append(asked.out, dict(zip(FIELDS, row, strict=True)))
        print(f"{subject.key}  {test.case.corruption:20} {test.case.severity}  {area:6.2f}  {found:6.2f}", flush=True)


def _is_norm(site: trueup.Site) -> bool:
    """What `Shift.image` is made of; distances after activations would take most of the time."""
    return site.kind == "norm"


def _read(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.reader(file))[1:]


if __name__ == "__main__":
    main()
