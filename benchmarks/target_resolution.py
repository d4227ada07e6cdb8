"""What storing targets at few quantile levels loses: the table of docs/targets.md.

    python benchmarks/target_resolution.py --data ROOT

On the public CIFAR-10 ResNet-20, 500 training images: for each resolution the error of the target against the one
at full resolution (1-Wasserstein distance over the target's mean, the worst site), the error that the targets state
themselves, the share of predictions on blurred test images that stay the same, and the size of the file.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import torch

import trueup
from trueup import functional
from trueup_lab.data import cifar10
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.images import IMAGENET
from trueup_lab.models import load_public

RESOLUTIONS = (65, 129, 257, 513, 1025, 2049)
FIELDS = ("resolution", "worst_error", "worst_stated_error", "same_predictions", "file_kb")


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the data root")
    parser.add_argument("--calibrate", type=int, default=500, help="training images")
    parser.add_argument("--images", type=int, default=250, help="test images")
    parser.add_argument("--out", type=Path, default=Path("results/target_resolution.csv"))
    asked = parser.parse_args()
    model = load_public(asked.data / "weights" / "resnet20_cifar10_bn_public.safetensors")
    train = cifar10.load("train", asked.data).first(asked.calibrate).images
    test = cifar10.load("test", asked.data).first(asked.images).images
    blurred = IMAGENET(corrupt(test, "gaussian_blur", 5, family="cifar10-c"))

    def calibrated(resolution: int | None) -> trueup.Targets:
        batches = (IMAGENET(part) for part in train.split(250))
        only = {"select": lambda site: site.kind == "activation"}  # what norms keep does not depend on levels
        return trueup.calibrate(model, batches, resolution=resolution, method="sort", **only)

    @torch.inference_mode()
    def predictions(targets: trueup.Targets) -> torch.Tensor:
        robust = trueup.correct(model, targets, trueup.Correction(1.0, 0.2, method="sort"))
        return torch.cat([robust(part).argmax(dim=1) for part in blurred.split(250)])

    full = calibrated(None)
    reference = predictions(full)
    rows = []
    for resolution in RESOLUTIONS:
        targets = calibrated(resolution)
        errors, stated = [], []
        for name, site in full.activations.items():
            stored = targets.activations[name].order_statistics(len(site.target))
            errors.append(functional.wasserstein(site.target[None], stored).item() / site.target.mean().item())
            stated.append(targets.activations[name].compression_error / site.target.mean().item())
        with tempfile.TemporaryDirectory() as folder:
            targets.save(Path(folder, "targets"))
            size = Path(folder, "targets").stat().st_size
        same = (predictions(targets) == reference).float().mean().item()
        rows.append((resolution, f"{max(errors):.1e}", f"{max(stated):.1e}", f"{same:.4f}", size // 1000))
        print(dict(zip(FIELDS, rows[-1], strict=True)), flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with asked.out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([FIELDS, *rows])


if __name__ == "__main__":
    main()
