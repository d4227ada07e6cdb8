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
from trueup.cli.train import parse_seeds
from trueup.evaluation import Benchmark, Subject, read_subjects
from trueup.evaluation.calibration import targets_of
from trueup.evaluation.metrics import separation
from trueup.evaluation.precision import measured_precision
from trueup.evaluation.processes import ALONE
from trueup.evaluation.sets import CLEAN, TestSet

FIELDS = (
    *("model", "seed", "corruption", "severity", "images", "separation", "found"),
    *("data", "calibrated", "checkpoint", "torch", "device"),
)
LEVEL = 0.99


def main() -> None:
    """Measure what is missing from the CSV, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="files of models, or names of those that come with trueup")
    parser.add_argument("--data", type=Path, help="the data root")
    parser.add_argument("--seeds", type=parse_seeds, help="of a file with many models, as in 0-9 or 0,3")
    parser.add_argument("--images", type=int, help="of each test set; all if not given")
    parser.add_argument("--calibrate", type=int, help="clean images for targets; all if not given")
    parser.add_argument("--severity", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--targets", type=Path, default=Path("runs/targets"), help="where calibrations are kept")
    parser.add_argument("--out", type=Path, default=Path("results/detection.csv"))
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
        _append(asked.out, (*key(test)[:5], f"{area:.2f}", f"{found:.2f}", test.origin, *facts))
        print(f"{subject.key}  {test.case.corruption:20} {test.case.severity}  {area:6.2f}  {found:6.2f}", flush=True)


def _is_norm(site: trueup.Site) -> bool:
    """What `Shift.image` is made of; distances after activations would take most of the time."""
    return site.kind == "norm"


def _read(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.reader(file))[1:]


def _append(path: Path, row: tuple[object, ...]) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([FIELDS, row] if new else [row])


if __name__ == "__main__":
    main()
