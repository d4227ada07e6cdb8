"""What the constants of `Evidence` were chosen by: clean images and four corruptions that no table averages over.

    python benchmarks/choosing.py results/models/resnet20-bn-cifar10.safetensors --data ROOT --seeds 0-2

A row a setting: the accuracy on clean test images, the share of predictions on them that it changes, and the mean
accuracy over speckle noise, gaussian blur, spatter and saturate at five severities. The model answers once as it is and
once for each strength; every budget is then an average of two of these answers. With --one-pass, it is instead the
settings that answer once and correct every image, an unusual one by more. Rows are appended to a CSV.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import trueup
from trueup.cli.train import parse_seeds
from trueup.evaluation import Benchmark, Case, Mixed, Realign, Subject, read_subjects
from trueup.evaluation.calibration import targets_of
from trueup.evaluation.precision import measured_precision
from trueup.evaluation.processes import ALONE
from trueup.gate import openness

CHOSEN_ON = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
STRENGTHS = (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08)
BUDGETS = (0.0, 0.002, 0.005, 0.01, 0.02, 1.0)
ONE_PASS = (
    *(Realign(passes=1, least=least) for least in (0.1, 0.2, 0.3)),
    Realign(strength=0.05, passes=1, least=0.2),
)
FIELDS = (
    "model",
    "seed",
    "rule",
    "clean",
    "changed",
    "chosen",
    "images",
    "calibrated",
    "checkpoint",
    "torch",
    "device",
)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="files of models, or names of those that come with trueup")
    parser.add_argument("--data", type=Path, help="the data root")
    parser.add_argument("--seeds", type=parse_seeds, help="of a file with many models, as in 0-9 or 0,3")
    parser.add_argument("--images", type=int, default=1000, help="of each corrupted set")
    parser.add_argument("--clean", type=int, help="clean images; all if not given")
    parser.add_argument("--calibrate", type=int, help="clean images for targets; all if not given")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument(
        "--one-pass", action="store_true", help="settings that answer once, not those that answer twice"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--targets", type=Path, default=Path("runs/targets"), help="where calibrations are kept")
    parser.add_argument("--out", type=Path, default=Path("results/choosing.csv"))
    asked = parser.parse_args()
    new = not asked.out.exists()
    with asked.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        for path in asked.models:
            for subject in read_subjects(path, asked.seeds):
                for row in rows_of(subject, asked):
                    writer.writerow(row)
                    file.flush()
                    print(f"{subject.key}  {row['rule']:40} {row['clean']} {row['changed']} {row['chosen']}")


def rows_of(subject: Subject, asked: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The rows of one model."""
    sets = {
        size: Benchmark(subject.set, root=asked.data, images=size, device=asked.device)
        for size in (asked.clean, asked.images)
    }
    model = subject.model.to(asked.device).eval()
    clean = sets[asked.clean]
    targets = targets_of(
        subject, model, clean, asked.calibrate, folder=asked.targets, batch=asked.batch, processes=ALONE
    )
    cases = [clean.open(Case("identity", 0))]
    cases += [sets[asked.images].open(Case(name, severity)) for name in CHOSEN_ON for severity in range(1, 6)]
    labels = torch.cat([case.labels for case in cases]).to(asked.device)
    first = len(cases[0].labels)

    @torch.inference_mode()
    def answers(network: torch.nn.Module) -> Tensor:
        with measured_precision():
            return torch.cat(
                [
                    network(subject.normalisation(case.take(some)))
                    for case in cases
                    for some in torch.arange(len(case.labels)).split(asked.batch)
                ]
            )

    def row(rule: str, said: Tensor) -> dict[str, object]:
        right = (said.argmax(1) == labels).float()
        return {
            "model": subject.name,
            "seed": subject.seed,
            "rule": rule,
            "clean": f"{100 * right[:first].mean():.2f}",
            "changed": f"{100 * (said.argmax(1) != own.argmax(1))[:first].float().mean():.2f}",
            "chosen": f"{100 * right[first:].mean():.2f}",
            "images": asked.images,
            "calibrated": clean.calibration_count(asked.calibrate),
            "checkpoint": subject.checkpoint,
            "torch": torch.__version__,
            "device": asked.device,
        }

    own = answers(model)
    if asked.one_pass:
        for rule in ONE_PASS:
            yield row(rule.name, answers(rule.prepare(model, targets)))
        return
    yield row("uncorrected", own)
    if subject.norm == "bn":
        for method in (Mixed(4), Mixed(8), Mixed(16)):
            yield row(method.name, answers(method.prepare(model, None)))  # type: ignore[arg-type]
    read = {"select": lambda site: site.name in targets.gate}  # all that is asked of these images
    with torch.inference_mode():
        unusual = torch.cat(
            [
                trueup.measure(model, targets, subject.normalisation(case.take(some)), **read).image
                for case in cases
                for some in torch.arange(len(case.labels)).split(asked.batch)
            ]
        )
    for strength in STRENGTHS:
        corrected = answers(trueup.correct(model, targets, trueup.Evidence(budget=1, strength=strength)))
        for budget in BUDGETS:
            weight = torch.ones(len(labels), device=asked.device)
            if budget < 1:
                weight = (1 + openness(1 - unusual.double(), budget).to(asked.device).float()) / 2
            said = torch.lerp(own.float(), corrected.float(), weight[:, None])
            yield row(f"evidence:budget={budget},strength={strength}", said)


if __name__ == "__main__":
    main()
