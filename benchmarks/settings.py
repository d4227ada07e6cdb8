"""Compare what the decision measures of every setting with what the setting does to test images.

    python benchmarks/settings.py cifar10 vgg-bn-cifar10 --data ROOT
    python benchmarks/settings.py imagenet weights/mobilenet_v2_imagenet_bn.safetensors --data ROOT --images 100

The limits of the decision and its candidates were set on these numbers: clean images and the four corruptions on which
constants may be chosen, at severities 1, 3 and 5. `moved` is how far clean scores move, `changed` the share of clean
answers that change, in percent, each on calibration images and on test images; `value` is the gain that the decision
compares, in points; `clean` and `four` are points over the uncorrected model on test images. `--floor 0.001` also tries
the settings with another floor; what the decision saw of those is not a number.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import trueup
from bench import CALIBRATED, Data, answers, corrupt_set, error_of, read, subjects
from trueup._answers import relative_changes
from trueup_lab.data.corruptions import CHOSEN_ON
from trueup_lab.devices import device_name
from trueup_lab.tables import number, read_table, start_table, write_table

SEVERITIES = (1, 3, 5)


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One setting on one model."""

    set: str
    model: str
    seed: int
    rule: str
    chosen: bool
    moved: float = number(".4f")
    moved_test: float = number(".4f")
    changed: float = number(".2f")
    changed_test: float = number(".2f")
    value: float = number(".3f")
    clean: float = number(".3f")
    clean_error: float = number(".3f")
    four: float = number(".3f")
    four_error: float = number(".3f")
    clean_images: int
    corrupted_images: int
    calibrated: int
    torch: str
    device: str


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=["cifar10", "imagenet"])
    parser.add_argument("models", nargs="+", help="model files, or names of bundled models")
    parser.add_argument("--data", type=Path, required=True, help="the data root")
    parser.add_argument("--seeds", type=int, nargs="*", help="seeds in files of several models (default: all)")
    parser.add_argument("--images", type=int, default=300, help="images of each corrupted set")
    parser.add_argument("--clean", type=int, help="clean test images (default: all)")
    parser.add_argument("--floor", type=float, action="append", default=[], help="also with this floor; repeatable")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/settings.csv"))
    asked = parser.parse_args()
    asked.method = ["evidence"]  # `subjects` prepares methods; none is needed
    data = read(asked.set, asked.data, CALIBRATED[asked.set])
    clean = data.test[: asked.clean]
    corrupted = [
        corrupt_set(asked, data.test[: asked.images], name, severity) for name in CHOSEN_ON for severity in SEVERITIES
    ]
    start_table(asked.out, SettingRow)
    for where in asked.models:
        for name, seed, model, normalise, _ in subjects(asked, where):
            found = rows(asked, name, seed, model, normalise, data, clean, corrupted)
            others = [row for row in read_table(asked.out, SettingRow) if (row.model, row.seed) != (name, seed)]
            write_table(asked.out, SettingRow, [*others, *found])
            print(f"{name} {seed}", flush=True)


def rows(
    asked: argparse.Namespace,
    name: str,
    seed: int,
    model: nn.Module,
    normalise: Callable[[Tensor], Tensor],
    data: Data,
    clean: Tensor,
    corrupted: Sequence[Tensor],
) -> list[SettingRow]:
    """One row per setting that the decision tried."""
    model = model.to(asked.device).eval()
    batches = [normalise(part.to(asked.device)) for part in data.calibration.split(asked.batch)]
    targets = trueup.calibrate(model, batches, progress=False)
    decision = targets.decision
    if decision is None or not decision.trials:
        raise SystemExit(f"{name}: {decision}")
    sets = [clean, *corrupted]
    own = [answers(model, normalise, images, asked) for images in sets]
    before = [right(said, data.labels) for said in own]
    found = []
    seen = {trial.rule: trial for trial in decision.trials[1:]}
    others = [replace(rule, floor=floor) for floor in asked.floor for rule in seen]
    for rule in dict.fromkeys([*seen, *others]):
        trial = seen.get(rule)
        network = trueup.correct(model, targets, rule)
        said = [answers(network, normalise, images, asked) for images in sets]
        gains = [right(a, data.labels) - b for a, b in zip(said, before, strict=True)]
        four = torch.stack(gains[1:]).mean(dim=0)
        found.append(
            SettingRow(
                set=asked.set,
                model=name,
                seed=seed,
                rule=repr(rule),
                chosen=rule == targets.rule,
                moved=trial.mean_moved if trial else math.nan,
                moved_test=moved(model, network, normalise, clean, asked),
                changed=100 * trial.changed / trial.images if trial else math.nan,
                changed_test=100 * float((said[0] != own[0]).double().mean()),
                value=100 * trial.mean_gain if trial else math.nan,
                clean=float(gains[0].mean()),
                clean_error=error_of(gains[0]),
                four=float(four.mean()),
                four_error=error_of(four),
                clean_images=len(clean),
                corrupted_images=len(four),
                calibrated=len(data.calibration),
                torch=torch.__version__,
                device=device_name(asked.device),
            )
        )
    return found


def right(said: Tensor, labels: Tensor) -> Tensor:
    """100 for each right answer, 0 for a wrong one."""
    return 100 * (said == labels[: len(said)]).double()


def moved(
    model: nn.Module,
    network: nn.Module,
    normalise: Callable[[Tensor], Tensor],
    images: Tensor,
    asked: argparse.Namespace,
) -> float:
    """Mean distance that the scores of test images move, as the decision measures it."""
    parts = []
    with torch.inference_mode():
        for part in images[:1000].split(asked.batch):
            inputs = normalise(part.to(asked.device))
            parts.append(relative_changes(model(inputs), network(inputs), len(inputs)).flatten())
    return float(torch.cat(parts).mean())


if __name__ == "__main__":
    main()
