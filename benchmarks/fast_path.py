"""What the histogram loses: the fast correction beside the exact one on two public networks, corruption by corruption.

    python benchmarks/fast_path.py resnet20 --data ROOT      # CIFAR-10, 19 corruptions x 5 severities, 1000 images
    python benchmarks/fast_path.py resnet50 --data ROOT      # ImageNet, 15 corruptions x 5 severities

The weights are public checkpoints under ROOT/weights; corrupted images are made by the generators here. Both sides
correct towards their own targets: exact ones by sorting, fast ones from histograms. Rows are appended to a CSV as they
come, and those that are there already are not made again.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

import trueup
from trueup_lab.data import cifar10
from trueup_lab.data.corruptions import corrupt, corruption_names
from trueup_lab.data.imagenet import ImageFolder
from trueup_lab.data.images import IMAGENET, Images
from trueup_lab.models import load_public

FIELDS = ("network", "corruption", "severity", "images", "right_exact", "right_fast", "agree", "torch", "device")
PAPERS = {"resnet20": (1.0, 0.2), "resnet50": (0.5, 0.5)}
FAMILY = {"resnet20": "cifar10-c", "resnet50": "imagenet-c"}
COUNTS = {"resnet20": (1000, 1000, 250), "resnet50": (500, 500, 50)}  # images, to calibrate on, in a batch
ALLOWED = {"mean": 0.1, "any corruption": 0.5, "agreement": 99.0}


def main() -> None:
    """Measure, append, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=PAPERS)
    parser.add_argument("--data", type=Path, required=True, help="the data root")
    parser.add_argument("--images", type=int, help="corrupted images a set (ResNet-20: 1000, ResNet-50: 500)")
    parser.add_argument("--corruption", action="append", help="only this one; may be repeated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/fast_path.csv"))
    asked = parser.parse_args()
    count, calibrate, batch = COUNTS[asked.network]
    count = asked.images or count
    family = FAMILY[asked.network]
    model, seen, test = (_cifar if asked.network == "resnet20" else _imagenet)(asked.data, calibrate, count)
    model = model.to(asked.device)
    lambda1, lambda2 = PAPERS[asked.network]
    exact, fast = (_corrected(model, seen, trueup.Correction(lambda1, lambda2, method=m), batch, asked.device)
                   for m in ("sort", "histogram"))  # fmt: skip
    done = {(r["network"], r["corruption"], int(r["severity"]), int(r["images"])) for r in _read(asked.out)}
    for corruption in asked.corruption or corruption_names(family):
        for severity in range(1, 6):
            if (asked.network, corruption, severity, count) in done:
                continue
            images = corrupt(test.images, corruption, severity, family=family, root=asked.data)
            ours, theirs = (_predict(network, images, batch, asked.device) for network in (fast, exact))
            right = [int((answer == test.labels).sum()) for answer in (theirs, ours)]
            agree = int((ours == theirs).sum())
            row = (asked.network, corruption, severity, count, *right, agree, torch.__version__, asked.device)
            _append(asked.out, row)
            print(f"{corruption:20} {severity}  {right[0]:5} {right[1]:5}  agree {agree} of {count}", flush=True)
    _print([r for r in _read(asked.out) if r["network"] == asked.network and int(r["images"]) == count])


def _corrected(model: nn.Module, seen: Tensor, correction: trueup.Correction, batch: int, device: str) -> nn.Module:
    """The corrected model, its targets measured in the same way as it corrects."""
    batches = (IMAGENET(part).to(device) for part in seen.split(batch))
    return trueup.correct(model, trueup.calibrate(model, batches, method=correction.method), correction)


def _cifar(root: Path, calibrate: int, test: int) -> tuple[nn.Module, Tensor, Images]:
    model = load_public(root / "weights" / "resnet20_cifar10_bn_public.safetensors")
    return model, cifar10.load("train", root).first(calibrate).images, cifar10.load("test", root).first(test)


def _imagenet(root: Path, calibrate: int, test: int) -> tuple[nn.Module, Tensor, Images]:
    model = load_public(root / "weights" / "resnet50_v1_imagenet_bn.safetensors")
    folder = ImageFolder(root / "imagenet_val_1k" / "val")
    # Synsets are sorted by name, so neighbours are alike: every other image is tested on, the rest calibrated on.
    items = [folder[i] for i in range(0, len(folder), 2)[:test]]
    others = torch.stack([folder[i][0] for i in range(1, len(folder), 2)[:calibrate]])
    return model, others, Images(torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items]))


@torch.inference_mode()
def _predict(network: nn.Module, images: Tensor, batch: int, device: str) -> Tensor:
    return torch.cat([network(IMAGENET(part).to(device)).argmax(dim=1).cpu() for part in images.split(batch)])


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _append(path: Path, row: tuple[object, ...]) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([FIELDS, row] if new else [row])


def _print(rows: list[dict[str, str]]) -> None:
    def share(row: dict[str, str], field: str) -> float:
        return 100 * int(row[field]) / int(row["images"])

    print(f"\n{'':20}  exact   fast  difference  agree")
    differences = {}
    for corruption in dict.fromkeys(row["corruption"] for row in rows):
        mine = [row for row in rows if row["corruption"] == corruption]
        exact, fast, agree = (fmean(share(r, f) for r in mine) for f in ("right_exact", "right_fast", "agree"))
        differences[corruption] = fast - exact
        print(f"{corruption:20} {exact:6.2f} {fast:6.2f} {fast - exact:11.2f} {agree:6.2f}")
    found = {
        "mean": abs(fmean(differences.values())),
        "any corruption": max(abs(d) for d in differences.values()),
        "agreement": fmean(share(row, "agree") for row in rows),
    }
    for name, value in found.items():
        met = value >= ALLOWED[name] if name == "agreement" else value <= ALLOWED[name]
        print(f"{name}: {value:.3f}, allowed {ALLOWED[name]}: {'met' if met else 'missed'}")


if __name__ == "__main__":
    main()
