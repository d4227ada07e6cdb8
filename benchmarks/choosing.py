"""Compare settings of `Evidence` on clean images and the four corruptions on which its constants are chosen.

    python benchmarks/choosing.py results/models/resnet20-bn-cifar10.safetensors --data ROOT --seeds 0-1 --images 500

Each row holds one setting: accuracy on clean test images, the share of predictions on them that it changes, and mean
accuracy over speckle noise, gaussian blur, spatter and saturate at five severities. The settings are the uncorrected
model, BN mixing, the default of `Evidence`, variants that differ in one field, and some without a gate. All images are
kept on the device. Rows are appended to a CSV file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from of_models import options
from trueup_lab.data.corruptions import CHOSEN_ON
from trueup_lab.evaluation import Benchmark, Case, Method, Realign, Subject, Uncorrected, read_subjects
from trueup_lab.evaluation.calibration import targets_of
from trueup_lab.evaluation.precision import measured_precision
from trueup_lab.experiments.specs import MIXING, RULES
from trueup_lab.tables import append_rows, number, start_table

DEFAULT, _, UNGATED = RULES
METHODS: tuple[Method, ...] = (
    Uncorrected(),
    *MIXING,
    DEFAULT,
    UNGATED,
    *(replace(UNGATED, strength=strength) for strength in (0.0, 0.001, 0.01)),
    *(replace(UNGATED, base=base) for base in (0.0, 0.03, 0.06)),
    *(Realign(budget=budget) for budget in (0.005, 0.02)),
    *(Realign(strength=strength) for strength in (0.03, 0.1)),
    *(Realign(base=base) for base in (0.0, 0.04, 0.12)),
    *(Realign(least=least) for least in (0.0, 0.1, 0.2)),
    Realign(bands=False),
)
SETTINGS: dict[str, Method] = {
    **{method.name: method for method in METHODS},
    "evidence, means count half": Realign(counts=(0.5, 0.5, 1.0)),
    "evidence, low bands count 1": Realign(counts=(0.25, 1.0, 1.0)),
    "evidence, all count 1": Realign(counts=(1.0, 1.0, 1.0)),
    "evidence, all norms": Realign(depth=1.0),
    "evidence, but the last tenth": Realign(depth=0.9),
}
"""The settings by their names in rows. The last five were named before they were fields of the rule."""


@dataclass(frozen=True, kw_only=True)
class ChoosingRow:
    """One setting on one model. Accuracies and shares are in percent."""

    model: str
    seed: int
    rule: str
    clean: float = number(".2f")
    changed: float = number(".2f")  # share of predictions on clean images
    chosen: float = number(".2f")  # accuracy on the four corruptions
    images: int
    calibrated: int
    checkpoint: str
    torch: str
    device: str


def main() -> None:
    """Measure all settings on the given models, and print them."""
    parser = options(__doc__, "results/choosing.csv")
    parser.add_argument("--images", type=int, default=1000, help="images per corrupted set")
    parser.add_argument("--clean", type=int, help="clean test images (default: all)")
    asked = parser.parse_args()
    start_table(asked.out, ChoosingRow)
    for path in asked.models:
        for subject in read_subjects(path, asked.seeds):
            for row in rows_of(subject, asked):
                append_rows(asked.out, [row])
                print(f"{subject.key}  {row.rule:40} {row.clean:.2f} {row.changed:.2f} {row.chosen:.2f}")


def rows_of(subject: Subject, asked: argparse.Namespace) -> Iterator[ChoosingRow]:
    """Yield the rows of one model."""
    sets = {
        size: Benchmark(subject.set, root=asked.data, images=size, device=asked.device)
        for size in (asked.clean, asked.images)
    }
    model = subject.model.to(asked.device).eval()
    clean = sets[asked.clean]
    targets = targets_of(subject, model, clean, asked.calibrate, folder=asked.targets, batch=asked.batch)
    cases = [clean.open(Case("identity", 0))]
    cases += [sets[asked.images].open(Case(name, severity)) for name in CHOSEN_ON for severity in range(1, 6)]
    labels = torch.cat([case.labels for case in cases]).to(asked.device)
    shown = [case.take(torch.arange(len(case.labels))) for case in cases]
    first = len(cases[0].labels)

    @torch.inference_mode()
    def answers(method: Method) -> Tensor:
        network = method.prepare(model, targets)
        with measured_precision():
            parts = (network(subject.normalisation(some)) for images in shown for some in images.split(asked.batch))
            return torch.cat([logits.argmax(1) for logits in parts])

    own = answers(Uncorrected())
    for name, method in SETTINGS.items():
        if not subject.takes(method):
            continue
        said = answers(method)
        right = (said == labels).float()
        yield ChoosingRow(
            model=subject.name,
            seed=subject.seed,
            rule=name,
            clean=100 * float(right[:first].mean()),
            changed=100 * float((said != own)[:first].float().mean()),
            chosen=100 * float(right[first:].mean()),
            images=asked.images,
            calibrated=clean.calibration_count(asked.calibrate),
            checkpoint=subject.checkpoint,
            torch=torch.__version__,
            device=asked.device,
        )


if __name__ == "__main__":
    main()
