"""How the readings of the paper's algorithm do on two public networks: the table of docs/targets.md.

    python benchmarks/readings.py resnet20 --data ROOT      # CIFAR-10, all 19 corruptions, severities 1, 3, 5
    python benchmarks/readings.py resnet50 --data ROOT      # ImageNet, 8 corruptions, severities 1, 3, 5

The weights are public checkpoints under ROOT/weights. ResNet-20 is calibrated on 3,000 training images. ImageNet's
training set being large, ResNet-50 is calibrated on validation images that are not tested on. Rows are appended to a
CSV as they come, and those that are there already are not made again.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
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

FIELDS = ("network", "method", "corruption", "severity", "images", "right", "torch", "device")
SEVERITIES = (1, 3, 5)
PAPERS = {"resnet20": (1.0, 0.2), "resnet50": (0.5, 0.5)}
EIGHT = ("gaussian_noise", "impulse_noise", "defocus_blur", "motion_blur", "fog", "brightness", "contrast", "pixelate")


def methods(network: str) -> dict[str, trueup.Correction | None]:
    """What is compared: no correction, and the paper's setting for the set in each reading."""
    lambda1, lambda2 = PAPERS[network]
    return {
        "uncorrected": None,
        "keep": trueup.Correction(lambda1, lambda2, method="sort"),
        "match": trueup.Correction(lambda1, lambda2, location="match", method="sort"),
        "keep, not sparse": trueup.Correction(lambda1, lambda2, sparse=False, method="sort"),
    }


def main() -> None:
    """Measure, append, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=PAPERS)
    parser.add_argument("--data", type=Path, required=True, help="the data root")
    parser.add_argument("--images", type=int, help="corrupted images a set (ResNet-20: 240, ResNet-50: 500)")
    parser.add_argument("--clean", type=int, help="clean images (ResNet-20: 2000, ResNet-50: 500)")
    parser.add_argument("--calibrate", type=int, help="images to calibrate on (ResNet-20: 3000, ResNet-50: 500)")
    parser.add_argument("--method", action="append", help="only this one; may be repeated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/readings.csv"))
    asked = parser.parse_args()
    small = asked.network == "resnet20"
    count = asked.images or (240 if small else 500)
    clean = asked.clean or (2000 if small else 500)
    calibrate = asked.calibrate or (3000 if small else 500)

    done = _read(asked.out)
    names = corruption_names("cifar10-c") if small else EIGHT
    cases = [("clean", 0, clean), *((name, severity, count) for name in names for severity in SEVERITIES)]
    chosen = {name: rule for name, rule in methods(asked.network).items() if name in (asked.method or [name])}
    model, seen, test = (_cifar if small else _imagenet)(asked.data, calibrate, max(clean, count))
    model = model.to(asked.device)
    targets = trueup.calibrate(model, (batch.to(asked.device) for batch in seen), method="sort")
    networks = {name: model if rule is None else trueup.correct(model, targets, rule) for name, rule in chosen.items()}
    for corruption, severity, images in cases:
        missing = [m for m in networks if (asked.network, m, corruption, severity, images) not in done]
        if not missing:
            continue
        part = test.first(images)
        if severity:
            family = "cifar10-c" if small else "imagenet-c"
            part = Images(corrupt(part.images, corruption, severity, family=family, root=asked.data), part.labels)
        for method in missing:
            right = _right(networks[method], part, asked.device, 240 if small else 20)
            row = (asked.network, method, corruption, severity, images, right, torch.__version__, asked.device)
            _append(asked.out, row)
            print(f"{method:18} {corruption:20} {severity}  {100 * right / images:6.2f}", flush=True)
    _print(asked.network, asked.out)


def _cifar(root: Path, calibrate: int, test: int) -> tuple[nn.Module, Iterator[Tensor], Images]:
    model = load_public(root / "weights" / "resnet20_cifar10_bn_public.safetensors")
    train = cifar10.load("train", root).first(calibrate).images
    return model, (IMAGENET(part) for part in train.split(250)), cifar10.load("test", root).first(test)


def _imagenet(root: Path, calibrate: int, test: int) -> tuple[nn.Module, Iterator[Tensor], Images]:
    model = load_public(root / "weights" / "resnet50_v1_imagenet_bn.safetensors")
    folder = ImageFolder(root / "imagenet_val_1k" / "val")
    # Synsets are sorted by name, so neighbours are alike: every other image is tested on, the rest calibrated on.
    tested = range(0, len(folder), 2)[:test]
    others = range(1, len(folder), 2)[:calibrate]
    items = [folder[i] for i in tested]
    seen = (IMAGENET(torch.stack([folder[i][0] for i in others[k : k + 20]])) for k in range(0, len(others), 20))
    return model, seen, Images(torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items]))


@torch.inference_mode()
def _right(network: nn.Module, data: Images, device: str, batch: int) -> int:
    pairs = zip(data.images.split(batch), data.labels.split(batch), strict=True)
    return sum(int((network(IMAGENET(x).to(device)).argmax(1).cpu() == y).sum()) for x, y in pairs)


def _read(path: Path) -> dict[tuple[str, str, str, int, int], int]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            (r["network"], r["method"], r["corruption"], int(r["severity"]), int(r["images"])): int(r["right"])
            for r in csv.DictReader(file)
        }


def _append(path: Path, row: tuple[object, ...]) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([FIELDS, row] if new else [row])


def _print(network: str, path: Path) -> None:
    rows = {key: 100 * right / key[4] for key, right in _read(path).items() if key[0] == network}
    print(f"\n{network:18}  clean  sev 1  sev 3  sev 5   mean")
    for method in dict.fromkeys(key[1] for key in rows):
        means = [fmean(v for k, v in rows.items() if k[1] == method and k[3] == s) for s in (0, *SEVERITIES)]
        print(f"{method:18} " + " ".join(f"{mean:6.2f}" for mean in (*means, fmean(means[1:]))))


if __name__ == "__main__":
    main()
