"""Measure how many predictions change on clean images under the rule that `trueup.choose` returns.

    python benchmarks/budget.py results/models/resnet20-bn-cifar10.safetensors --data ROOT --seeds 0

A rule is chosen once on clean test images and once on as many calibration images (which the model was trained on,
except for ImageNet). Each row holds the chosen rule, the share of predictions it changes on the other test images, its
gain in points there, and its gain on the four corruptions on which constants are chosen, at all severities. Rows are
appended to a CSV file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

import trueup
from of_models import options
from trueup_lab.data.corruptions import CHOSEN_ON
from trueup_lab.evaluation import Benchmark, Case, Subject, read_subjects
from trueup_lab.evaluation.calibration import targets_of
from trueup_lab.evaluation.precision import measured_precision
from trueup_lab.tables import append_rows, as_text, number, start_table


@dataclass(frozen=True, kw_only=True)
class BudgetRow:
    """One chosen rule. Shares and accuracies are in percent."""

    model: str
    seed: int
    asked: float = number("g")
    images: int  # to choose by
    of: str  # test or calibration
    strength: float = number(".3g")
    base: float = number(".3g")
    changed: float = number(".2f")
    clean: float = number(".2f")
    others: int  # clean test images not used for choosing
    gained: float = number(".2f")
    corrupted: int
    calibrated: int
    checkpoint: str
    torch: str
    device: str


def main() -> None:
    """Measure the given models, and print the rows."""
    parser = options(__doc__, "results/budget.csv")
    parser.add_argument("--asked", type=float, nargs="+", default=[0.005, 0.01, 0.02], help="values of max_changed")
    parser.add_argument("--images", type=int, default=2000, help="clean images to choose by")
    parser.add_argument("--corrupted", type=int, default=500, help="images per corrupted set")
    asked = parser.parse_args()
    start_table(asked.out, BudgetRow)
    for path in asked.models:
        for subject in read_subjects(path, asked.seeds):
            for row in rows_of(subject, asked):
                append_rows(asked.out, [row])
                print(as_text([row]), end="", flush=True)


def rows_of(subject: Subject, asked: argparse.Namespace) -> Iterator[BudgetRow]:
    """Yield the rows of one model."""
    benchmark = Benchmark(subject.set, root=asked.data, images=None, device=asked.device)
    model = subject.model.to(asked.device).eval()
    targets = targets_of(subject, model, benchmark, asked.calibrate, folder=asked.targets, batch=asked.batch)
    clean = benchmark.open(Case("identity", 0))
    order = torch.randperm(len(clean.labels), generator=torch.Generator().manual_seed(0))
    some, others = order[: asked.images], order[asked.images :]
    if not len(others):
        raise SystemExit(
            f"--images {asked.images}: there are {len(order)} test images, and some must be left to test on"
        )
    few = Benchmark(subject.set, root=asked.data, images=asked.corrupted, device=asked.device)
    corrupted = [few.open(Case(name, severity)) for name in CHOSEN_ON for severity in range(1, 6)]
    tests = [(clean, others), *((case, torch.arange(len(case.labels))) for case in corrupted)]
    shown = [(case.take(which), case.labels[which]) for case, which in tests]

    @torch.inference_mode()
    def answers(network: nn.Module) -> list[Tensor]:
        split = ([subject.normalisation(part) for part in images.split(asked.batch)] for images, _ in shown)
        return [torch.cat([network(part).argmax(1).cpu() for part in parts]) for parts in split]

    def right(said: list[Tensor]) -> list[float]:
        return [100 * float((s == labels).double().mean()) for s, (_, labels) in zip(said, shown, strict=True)]

    with measured_precision():
        own = answers(model)
        usual, *before = right(own)
        for share in asked.asked:
            for source in ("test", "calibration"):
                known = benchmark.calibration(len(some), batch=asked.batch)
                seen = known if source == "calibration" else (clean.take(part) for part in some.split(asked.batch))
                rule = trueup.choose(model, targets, (subject.normalisation(part) for part in seen), max_changed=share)
                said = answers(trueup.correct(model, targets, rule))
                now, *after = right(said)
                yield BudgetRow(
                    model=subject.name,
                    seed=subject.seed,
                    asked=100 * share,
                    images=len(some) if source == "test" else benchmark.calibration_count(len(some)),
                    of=source,
                    strength=rule.strength,
                    base=rule.base,
                    changed=100 * float((said[0] != own[0]).double().mean()),
                    clean=now - usual,
                    others=len(others),
                    gained=fmean(after) - fmean(before),
                    corrupted=asked.corrupted,
                    calibrated=benchmark.calibration_count(asked.calibrate),
                    checkpoint=subject.checkpoint,
                    torch=torch.__version__,
                    device=asked.device,
                )


if __name__ == "__main__":
    main()
