"""Compare the fast correction, by histogram, with the exact one, by sorting, on two public networks.

    python benchmarks/fast_path.py resnet20 --data ROOT      # CIFAR-10, 19 corruptions x 5 severities, 1000 images
    python benchmarks/fast_path.py resnet50 --data ROOT      # ImageNet, 19 corruptions x 5 severities, 500 images

The weights are public checkpoints under ROOT/weights. Corrupted images are generated. Each side has its own
targets: exact ones by sorting, fast ones from histograms. Rows are appended to a CSV file, and none is measured twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

import trueup
from public_networks import FAMILY, PAPERS, load_network
from trueup_lab.data.corruptions import corrupt, corruption_names
from trueup_lab.data.images import IMAGENET
from trueup_lab.tables import append_rows, read_table, start_table

COUNTS = {"resnet20": (1000, 1000, 250), "resnet50": (500, 500, 50)}  # test images, calibration images, batch size
ALLOWED = {"mean": 0.1, "any corruption": 0.5, "agreement": 99.0}
_KEY = attrgetter("key")


@dataclass(frozen=True)
class FastPathRow:
    """Numbers of images that each side classifies correctly, and on which both agree."""

    network: str
    corruption: str
    severity: int
    images: int
    right_exact: int
    right_fast: int
    agree: int
    torch: str
    device: str

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that identify the measurement."""
        return self.network, self.corruption, self.severity, self.images


def main() -> None:
    """Measure what is missing from the CSV file, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=PAPERS)
    parser.add_argument("--data", type=Path, required=True, help="the data root")
    parser.add_argument("--images", type=int, help="images per corrupted set (ResNet-20: 1000, ResNet-50: 500)")
    parser.add_argument("--corruption", action="append", help="only this corruption; repeatable")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/fast_path.csv"))
    asked = parser.parse_args()
    count, calibrate, batch = COUNTS[asked.network]
    count = asked.images or count
    family = FAMILY[asked.network]
    model, seen, test = load_network(asked.network, asked.data, calibrate=calibrate, test=count)
    model = model.to(asked.device)
    lambda1, lambda2 = PAPERS[asked.network]
    exact, fast = (_corrected(model, seen, trueup.Correction(lambda1, lambda2, method=m), batch, asked.device)
                   for m in ("sort", "histogram"))  # fmt: skip
    done = {row.key for row in start_table(asked.out, FastPathRow)}
    for corruption in asked.corruption or corruption_names(family):
        for severity in range(1, 6):
            if (asked.network, corruption, severity, count) in done:
                continue
            images = corrupt(test.images, corruption, severity, family=family, root=asked.data)
            ours, theirs = (_predict(network, images, batch, asked.device) for network in (fast, exact))
            right = [int((answer == test.labels).sum()) for answer in (theirs, ours)]
            agree = int((ours == theirs).sum())
            row = FastPathRow(
                asked.network, corruption, severity, count, *right, agree, torch.__version__, asked.device
            )
            append_rows(asked.out, [row], key=_KEY)
            print(f"{corruption:20} {severity}  {right[0]:5} {right[1]:5}  agree {agree} of {count}", flush=True)
    rows = read_table(asked.out, FastPathRow)
    _print([row for row in rows if row.network == asked.network and row.images == count])


def _corrected(model: nn.Module, seen: Tensor, correction: trueup.Correction, batch: int, device: str) -> nn.Module:
    """Return the corrected model, calibrated with the same algorithm that corrects it."""
    batches = (IMAGENET(part).to(device) for part in seen.split(batch))
    return trueup.correct(model, trueup.calibrate(model, batches, method=correction.method, decide=False), correction)


@torch.inference_mode()
def _predict(network: nn.Module, images: Tensor, batch: int, device: str) -> Tensor:
    return torch.cat([network(IMAGENET(part).to(device)).argmax(dim=1).cpu() for part in images.split(batch)])


def _print(rows: Sequence[FastPathRow]) -> None:
    def mean(rows: Sequence[FastPathRow], field: str) -> float:
        return fmean(100 * getattr(row, field) / row.images for row in rows)

    print(f"\n{'':20}  exact   fast  difference  agree")
    differences = {}
    for corruption in dict.fromkeys(row.corruption for row in rows):
        mine = [row for row in rows if row.corruption == corruption]
        exact, fast, agree = (mean(mine, field) for field in ("right_exact", "right_fast", "agree"))
        differences[corruption] = fast - exact
        print(f"{corruption:20} {exact:6.2f} {fast:6.2f} {fast - exact:11.2f} {agree:6.2f}")
    found = {
        "mean": abs(fmean(differences.values())),
        "any corruption": max(abs(d) for d in differences.values()),
        "agreement": mean(rows, "agree"),
    }
    for name, value in found.items():
        met = value >= ALLOWED[name] if name == "agreement" else value <= ALLOWED[name]
        print(f"{name}: {value:.3f}, allowed {ALLOWED[name]}: {'met' if met else 'missed'}")


if __name__ == "__main__":
    main()
