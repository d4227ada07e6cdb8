"""Measure how soon the drift test notices a corruption, on the digits that come with scikit-learn.

    python benchmarks/drift.py      # results/drift.csv, in about a minute

A stream of 180 clean test images is followed by 180 others under one corruption. `delay` is the number of corrupted
images that the test has seen when it raises its alarm (empty: no alarm), `dated` how many images its date is off, and
`found` and `found_by_measure` the percentages of corrupted images with a p-value of 0.05 or less, in the monitor (which
reads the first norm) and in `trueup.measure` (which reads the gate's norms). The last row is a clean stream of the same
length. All rows are for the setting that calibration chose.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import trueup
from trueup_lab import models
from trueup_lab.data import digits
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.images import NORMALISATION
from trueup_lab.tables import number, write_table

MODEL = "resnet20-bn-digits"
CORRUPTIONS = ("shot_noise", "impulse_noise", "glass_blur", "motion_blur", "brightness", "fog", "spatter", "rotate")
SEVERITIES = (1, 3, 5)
CLEAN = 180
LEVEL = 0.05
FALSE_ALARM = 0.001


@dataclass(frozen=True)
class DriftRow:
    """One stream."""

    model: str
    corruption: str
    severity: int
    delay: int | None
    dated: int | None
    found: float = number(".1f")
    found_by_measure: float = number(".1f")
    log10_e_value: float = number(".1f")
    false_alarm: float = number("g")
    held_out: int = 0
    rule: str = ""


def main() -> None:
    """Measure every stream and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/drift.csv"))
    asked = parser.parse_args()
    model = models.load(MODEL).eval()
    train, test = digits.load("train").images, digits.load("test").images
    targets = trueup.calibrate(model, map(as_input, train.split(128)))
    rows = []
    for name in (*CORRUPTIONS, "identity"):
        for severity in SEVERITIES if name != "identity" else (0,):
            changed = test[CLEAN:]
            if severity:
                changed = corrupt(changed, name, severity, family="mnist-c")
            rows.append(watch(model, targets, as_input(test[:CLEAN]), as_input(changed), name, severity))
            print(rows[-1])
    write_table(asked.out, DriftRow, rows)


@torch.inference_mode()
def watch(
    model: torch.nn.Module, targets: trueup.Targets, clean: Tensor, changed: Tensor, name: str, severity: int
) -> DriftRow:
    """Watch one stream, image by image."""
    robust = trueup.correct(model, targets, report=True)
    images = iter(range(len(clean) + len(changed)))
    monitor = trueup.Monitor(robust, false_alarm=FALSE_ALARM, clock=lambda: float(next(images)))
    p = []
    for batch in torch.cat([clean, changed]).split(60):
        _, report = robust(batch)
        for k in range(len(batch)):
            monitor.update({key: value[k : k + 1] for key, value in report.items()})
        p.append(report["p"])
    seen = monitor.snapshot()
    (drift,) = seen.streams.values()
    ranks = trueup.measure(model, targets, changed, select=lambda site: site.name in targets.gate).image_rank
    return DriftRow(
        MODEL,
        name,
        severity,
        None if drift.alarm is None else drift.alarm.image - len(clean),
        None if drift.alarm is None else round(drift.alarm.since) - len(clean),
        100 * float((torch.cat(p)[len(clean) :] <= LEVEL).float().mean()),
        100 * float((1 - ranks <= LEVEL).float().mean()),
        seen.log_e_value / 2.302585092994046,
        FALSE_ALARM,
        monitor.clean_images,
        str(robust.rule),
    )


def as_input(pixels: Tensor) -> Tensor:
    """Pixels as the model takes them."""
    return NORMALISATION["digits"](pixels)


if __name__ == "__main__":
    main()
