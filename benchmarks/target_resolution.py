"""Measure the error of targets that are stored at few quantile levels: the table of docs/targets.md.

    python benchmarks/target_resolution.py --data ROOT

On the public CIFAR-10 ResNet-20, calibrated on 500 training images. Each row holds, for one resolution, the largest
error of any site's target against full resolution (1-Wasserstein distance divided by the target's mean), the largest
error that the targets state themselves, the share of predictions on blurred test images that stay the same, and the
size of the file.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import trueup
from trueup import functional
from trueup_lab.data import cifar10
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.images import IMAGENET
from trueup_lab.models import load_public
from trueup_lab.tables import number, write_table

RESOLUTIONS = (65, 129, 257, 513, 1025, 2049)


@dataclass(frozen=True, kw_only=True)
class ResolutionRow:
    """One resolution. Errors are shares of the target's mean."""

    resolution: int
    worst_error: float = number(".1e")
    worst_stated_error: float = number(".1e")
    same_predictions: float = number(".4f")
    file_kb: int


def main() -> None:
    """Measure every resolution, write the CSV file and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the data root")
    parser.add_argument("--calibrate", type=int, default=500, help="training images to calibrate on")
    parser.add_argument("--images", type=int, default=250, help="test images")
    parser.add_argument("--out", type=Path, default=Path("results/target_resolution.csv"))
    asked = parser.parse_args()
    model = load_public(asked.data / "weights" / "resnet20_cifar10_bn_public.safetensors")
    train = cifar10.load("train", asked.data).first(asked.calibrate).images
    test = cifar10.load("test", asked.data).first(asked.images).images
    blurred = IMAGENET(corrupt(test, "gaussian_blur", 5, family="cifar10-c"))

    def calibrated(resolution: int | None) -> trueup.Targets:
        batches = (IMAGENET(part) for part in train.split(250))
        only = {"select": lambda site: site.kind == "activation"}  # norms do not depend on the resolution
        return trueup.calibrate(model, batches, resolution=resolution, method="sort", decide=False, **only)

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
        row = ResolutionRow(
            resolution=resolution,
            worst_error=max(errors),
            worst_stated_error=max(stated),
            same_predictions=same,
            file_kb=size // 1000,
        )
        rows.append(row)
        print(asdict(row), flush=True)
    write_table(asked.out, ResolutionRow, rows)


if __name__ == "__main__":
    main()
