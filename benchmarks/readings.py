"""Compare the readings of the paper's algorithm on two public networks: the table of docs/targets.md.

    python benchmarks/readings.py resnet20 --data ROOT      # CIFAR-10, all 19 corruptions, severities 1, 3, 5
    python benchmarks/readings.py resnet50 --data ROOT      # ImageNet, 8 corruptions, severities 1, 3, 5

The weights are public checkpoints under ROOT/weights. ResNet-20 is calibrated on 3,000 training images, ResNet-50 on
validation images that are not used for the test, because ImageNet's training set is large. Rows are appended to a CSV
file, and none is measured twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

import trueup
from public_networks import FAMILY, PAPERS, load_network
from trueup_lab.data.corruptions import corrupt, corruption_names
from trueup_lab.data.images import IMAGENET, Images
from trueup_lab.tables import append_rows, read_table, start_table

SEVERITIES = (1, 3, 5)
EIGHT = ("gaussian_noise", "impulse_noise", "defocus_blur", "motion_blur", "fog", "brightness", "contrast", "pixelate")
_KEY = attrgetter("key")


@dataclass(frozen=True)
class ReadingRow:
    """Number of images that one method classifies correctly. Clean images are the corruption "clean", severity 0."""

    network: str
    method: str
    corruption: str
    severity: int
    images: int
    right: int
    torch: str
    device: str

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that identify the measurement."""
        return self.network, self.method, self.corruption, self.severity, self.images


def methods(network: str) -> dict[str, trueup.Correction | None]:
    """Return the methods by name: no correction, and each reading with the paper's step sizes."""
    lambda1, lambda2 = PAPERS[network]
    return {
        "uncorrected": None,
        "keep": trueup.Correction(lambda1, lambda2, method="sort"),
        "match": trueup.Correction(lambda1, lambda2, location="match", method="sort"),
        "keep, not sparse": trueup.Correction(lambda1, lambda2, sparse=False, method="sort"),
    }


def main() -> None:
    """Measure what is missing from the CSV file, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=PAPERS)
    parser.add_argument("--data", type=Path, required=True, help="the data root")
    parser.add_argument("--images", type=int, help="images per corrupted set (ResNet-20: 240, ResNet-50: 500)")
    parser.add_argument("--clean", type=int, help="clean test images (ResNet-20: 2000, ResNet-50: 500)")
    parser.add_argument("--calibrate", type=int, help="calibration images (ResNet-20: 3000, ResNet-50: 500)")
    parser.add_argument("--method", action="append", help="only this method; repeatable")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/readings.csv"))
    asked = parser.parse_args()
    small = asked.network == "resnet20"
    count = asked.images or (240 if small else 500)
    clean = asked.clean or (2000 if small else 500)
    calibrate = asked.calibrate or (3000 if small else 500)
    batch = 240 if small else 20

    done = {row.key for row in start_table(asked.out, ReadingRow)}
    names = corruption_names("cifar10-c") if small else EIGHT
    cases = [("clean", 0, clean), *((name, severity, count) for name in names for severity in SEVERITIES)]
    chosen = {name: rule for name, rule in methods(asked.network).items() if name in (asked.method or [name])}
    model, seen, test = load_network(asked.network, asked.data, calibrate=calibrate, test=max(clean, count))
    model = model.to(asked.device)
    targets = trueup.calibrate(
        model, (IMAGENET(part).to(asked.device) for part in seen.split(batch)), method="sort", decide=False
    )
    networks = {name: model if rule is None else trueup.correct(model, targets, rule) for name, rule in chosen.items()}
    for corruption, severity, images in cases:
        missing = [m for m in networks if (asked.network, m, corruption, severity, images) not in done]
        if not missing:
            continue
        part = test.first(images)
        if severity:
            family = FAMILY[asked.network]
            part = Images(corrupt(part.images, corruption, severity, family=family, root=asked.data), part.labels)
        for method in missing:
            right = _right(networks[method], part, asked.device, batch)
            row = ReadingRow(
                asked.network, method, corruption, severity, images, right, torch.__version__, asked.device
            )
            append_rows(asked.out, [row], key=_KEY)
            print(f"{method:18} {corruption:20} {severity}  {100 * right / images:6.2f}", flush=True)
    _print(asked.network, [row for row in read_table(asked.out, ReadingRow) if row.network == asked.network])


@torch.inference_mode()
def _right(network: nn.Module, data: Images, device: str, batch: int) -> int:
    pairs = zip(data.images.split(batch), data.labels.split(batch), strict=True)
    return sum(int((network(IMAGENET(x).to(device)).argmax(1).cpu() == y).sum()) for x, y in pairs)


def _print(network: str, rows: Sequence[ReadingRow]) -> None:
    print(f"\n{network:18}  clean  sev 1  sev 3  sev 5   mean")
    for method in dict.fromkeys(row.method for row in rows):
        means = [
            fmean(100 * row.right / row.images for row in rows if row.method == method and row.severity == severity)
            for severity in (0, *SEVERITIES)
        ]
        print(f"{method:18} " + " ".join(f"{mean:6.2f}" for mean in (*means, fmean(means[1:]))))


if __name__ == "__main__":
    main()
