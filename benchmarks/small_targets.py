"""Measure what a small targets file loses: the digits network, corrected with the whole file and with the small one.

    python benchmarks/small_targets.py            # writes results/small_targets.csv, in a few minutes on one core

For comparison, the same with the targets of half of the training images: the effect of another choice of images.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import trueup
from trueup_lab import models
from trueup_lab.data import digits
from trueup_lab.data.corruptions import corrupt
from trueup_lab.demo import BATCH, CORRUPTIONS, MODEL
from trueup_lab.tables import number, write_table

RULES = {
    "strength 0.02, no gate": trueup.Evidence(budget=1, strength=0.02, base=0),
    "strength 0.1, no gate": trueup.Evidence(budget=1, strength=0.1, base=0),
    "Evidence()": trueup.Evidence(),
}


@dataclass(frozen=True)
class SmallRow:
    """One rule, with the targets of one file, on clean and corrupted test images."""

    rule: str
    targets: str
    images: int
    megabytes: float = number(".3g")
    accuracy: float = number(".2f")  # percent, over clean and corrupted images
    same: float = number(".2f")  # percent of predictions that are those of the whole file
    moved: float = number(".3g")  # distance of logits from those of the whole file, over what the correction moves them


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/small_targets.csv"))
    out = parser.parse_args().out
    model = models.load(MODEL).eval()
    train, test = digits.load("train"), digits.load("test")
    pictures = [test.images, *(corrupt(test.images, name, 3, family="mnist-c") for name in CORRUPTIONS)]
    tensors = [_normalised(images) for images in pictures]
    labels = test.labels.repeat(len(tensors))
    clean = _normalised(train.images)
    whole = trueup.calibrate(model, clean.split(BATCH))
    assert whole.rule is not None
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("whole", "small", "other half")}
        whole.save(paths["whole"], small=False)
        whole.save(paths["small"], small=True)
        trueup.calibrate(model, clean[::2].split(BATCH)).save(paths["other half"])
        rows = []
        for rule_name, rule in {"chosen by calibration": whole.rule, **RULES}.items():
            own = _logits(model, tensors)
            logits = {
                name: _logits(trueup.correct(model, trueup.Targets.load(path), rule), tensors)
                for name, path in paths.items()
            }
            for name, found in logits.items():
                rows.append(
                    SmallRow(
                        rule_name,
                        name,
                        len(labels),
                        paths[name].stat().st_size / 1e6,
                        100 * float((found.argmax(1) == labels).double().mean()),
                        100 * float((found.argmax(1) == logits["whole"].argmax(1)).double().mean()),
                        float((found - logits["whole"]).norm() / (logits["whole"] - own).norm()),
                    )
                )
                print(rows[-1], flush=True)
    write_table(out, SmallRow, rows)


def _normalised(images: Tensor) -> Tensor:
    return images.float() / 255  # as in training: to [0, 1]


@torch.inference_mode()
def _logits(network: nn.Module, tensors: list[Tensor]) -> Tensor:
    return torch.cat([network(part) for images in tensors for part in images.split(BATCH)])


if __name__ == "__main__":
    main()
