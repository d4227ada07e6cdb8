"""How many predictions on clean images change, where `trueup.choose` was asked for a share of them at most.

    python benchmarks/budget.py results/models/resnet20-bn-cifar10.safetensors --data ROOT --seeds 0

A rule is chosen by some of the clean test images, and by as many of those that targets are made of, which the model was
trained on but for ImageNet's. A row each: what was chosen, the share of predictions that it changes on the test images
that it was not chosen by, and the points that it gains there, and on the four corruptions that constants are chosen by,
at all severities. Rows are appended to a CSV.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import fmean

import torch
from torch import Tensor, nn

import trueup
from of_models import CHOSEN_ON, append, options
from trueup_lab.evaluation import Benchmark, Case, Subject, read_subjects
from trueup_lab.evaluation.calibration import targets_of
from trueup_lab.evaluation.precision import measured_precision
from trueup_lab.processes import ALONE


def main() -> None:
    """Measure what the command line asks for."""
    parser = options(__doc__, "results/budget.csv")
    parser.add_argument("--asked", type=float, nargs="+", default=[0.005, 0.01, 0.02], help="shares to be asked for")
    parser.add_argument("--images", type=int, default=2000, help="to choose by")
    parser.add_argument("--corrupted", type=int, default=500, help="of each corrupted set")
    asked = parser.parse_args()
    for path in asked.models:
        for subject in read_subjects(path, asked.seeds):
            for row in rows_of(subject, asked):
                append(asked.out, row)
                print(subject.key, *(f"{name} {row[name]}" for name in list(row)[2:12]))


def rows_of(subject: Subject, asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The rows of one model."""
    benchmark = Benchmark(subject.set, root=asked.data, images=None, device=asked.device)
    model = subject.model.to(asked.device).eval()
    targets = targets_of(
        subject, model, benchmark, asked.calibrate, folder=asked.targets, batch=asked.batch, processes=ALONE
    )
    clean = benchmark.open(Case("identity", 0))
    order = torch.randperm(len(clean.labels), generator=torch.Generator().manual_seed(0))
    some, others = order[: asked.images], order[asked.images :]
    if not len(others):
        raise SystemExit(f"there are {len(order)} test images; choose by fewer than that, --images")
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
                rule = trueup.choose(model, targets, (subject.normalisation(part) for part in seen), share)
                said = answers(trueup.correct(model, targets, rule))
                now, *after = right(said)
                yield {
                    "model": subject.name,
                    "seed": subject.seed,
                    "asked": f"{100 * share:g}",
                    "images": len(some) if source == "test" else benchmark.calibration_count(len(some)),
                    "of": source,
                    "strength": f"{rule.strength:.3g}",
                    "base": f"{rule.base:.3g}",
                    "changed": f"{100 * (said[0] != own[0]).double().mean():.2f}",
                    "clean": f"{now - usual:.2f}",
                    "others": len(others),
                    "gained": f"{fmean(after) - fmean(before):.2f}",
                    "corrupted": asked.corrupted,
                    "calibrated": benchmark.calibration_count(asked.calibrate),
                    "checkpoint": subject.checkpoint,
                    "torch": torch.__version__,
                    "device": asked.device,
                }


if __name__ == "__main__":
    main()
