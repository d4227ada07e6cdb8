"""How many predictions on clean images change, where `trueup.choose` was asked for a share of them at most.

    python benchmarks/budget.py results/models/resnet20-bn-cifar10.safetensors --data ROOT --seeds 0

A rule is chosen by some of the clean test images, and by as many of those that targets were made of, which the model
was trained on but for ImageNet's. A row each: what was chosen, and on the test images that it was not chosen by, the
share of predictions that it changes, and the accuracies with and without it. Rows are appended to a CSV.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

import trueup
from of_models import append, options
from trueup.evaluation import Benchmark, Case, Subject, read_subjects
from trueup.evaluation.calibration import targets_of
from trueup.evaluation.precision import measured_precision
from trueup.evaluation.processes import ALONE


def main() -> None:
    """Measure what the command line asks for."""
    parser = options(__doc__, "results/budget.csv")
    parser.add_argument("--asked", type=float, nargs="+", default=[0.005, 0.01, 0.02], help="shares to be asked for")
    parser.add_argument("--images", type=int, default=2000, help="to choose by")
    asked = parser.parse_args()
    for path in asked.models:
        for subject in read_subjects(path, asked.seeds):
            for row in rows_of(subject, asked):
                append(asked.out, row)
                print(subject.key, *(f"{name} {row[name]}" for name in list(row)[2:11]))


def rows_of(subject: Subject, asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The rows of one model."""
    benchmark = Benchmark(subject.set, root=asked.data, images=None, device=asked.device)
    model = subject.model.to(asked.device).eval()
    targets = targets_of(
        subject, model, benchmark, asked.calibrate, folder=asked.targets, batch=asked.batch, processes=ALONE
    )
    case = benchmark.open(Case("identity", 0))
    order = torch.randperm(len(case.labels), generator=torch.Generator().manual_seed(0))
    some, others = order[: asked.images], order[asked.images :]
    labels = case.labels[others]

    def batches(which: torch.Tensor) -> Iterator[torch.Tensor]:
        return (subject.normalisation(case.take(part).to(asked.device)) for part in which.split(asked.batch))

    @torch.inference_mode()
    def answers(network: torch.nn.Module) -> torch.Tensor:
        return torch.cat([network(images).argmax(1).cpu() for images in batches(others)])

    with measured_precision():
        own = answers(model)
        for share in asked.asked:
            for source in ("test", "calibration"):
                known = benchmark.calibration(len(some), batch=asked.batch)
                clean = batches(some) if source == "test" else (subject.normalisation(part) for part in known)
                rule = trueup.choose(model, targets, clean, share)
                said = answers(trueup.correct(model, targets, rule))
                yield {
                    "model": subject.name,
                    "seed": subject.seed,
                    "asked": f"{100 * share:g}",
                    "images": len(some),
                    "of": source,
                    "strength": f"{rule.strength:.3g}",
                    "base": f"{rule.base:.3g}",
                    "changed": f"{100 * (said != own).float().mean():.2f}",
                    "others": len(others),
                    "clean": f"{100 * (said == labels).float().mean():.2f}",
                    "uncorrected": f"{100 * (own == labels).float().mean():.2f}",
                    "calibrated": benchmark.calibration_count(asked.calibrate),
                    "checkpoint": subject.checkpoint,
                    "torch": torch.__version__,
                    "device": asked.device,
                }


if __name__ == "__main__":
    main()
