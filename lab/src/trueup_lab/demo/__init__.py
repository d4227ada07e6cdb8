"""The demonstration: a small network on handwritten digits, with both rules, under nine corruptions.

It needs no download: load a model, calibrate it on its clean training images, correct it with each rule, and compare
all three on the same corrupted test images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

import trueup
from trueup_lab import models
from trueup_lab.data import digits
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.images import NORMALISATION, Images
from trueup_lab.training.engine import Engine
from trueup_lab.training.recipes import RECIPES
from trueup_lab.training.run import Choices, TrainingProgress, train

MODEL = "resnet20-bn-digits"
PAPERS_MNIST = trueup.Correction(lambda1=0.75, lambda2=0.25, iterations=2)
"""The paper's setting for MNIST with batch norm."""

CORRUPTIONS = (
    "shot_noise",
    "impulse_noise",
    "glass_blur",
    "motion_blur",
    "brightness",
    "fog",
    "spatter",
    "rotate",
    "translate",
)
SEVERITIES = (1, 3, 5)
PLAIN = "as_trained"
RULES = ("correction", "evidence")
BATCH = 60


@dataclass(frozen=True)
class DemoRow:
    """Accuracies on one test set, in percent: as trained and with each rule. The corruption is `clean` for none."""

    corruption: str
    severity: int  # 0 for clean
    accuracy: Mapping[str, float]  # of PLAIN and each of RULES

    def gain(self, rule: str) -> float:
        """Percentage points gained by `rule`."""
        return self.accuracy[rule] - self.accuracy[PLAIN]


@dataclass(frozen=True)
class Result:
    """Results of the demonstration."""

    rows: tuple[DemoRow, ...]
    examples: dict[str, Tensor]  # corruption -> one image (28, 28) uint8 at the highest severity
    images: int  # per test set
    calibration_seconds: float
    ms: Mapping[str, float]  # milliseconds per image, of PLAIN and each of RULES

    @property
    def clean(self) -> DemoRow:
        """The row of the clean test images."""
        return next(row for row in self.rows if row.severity == 0)

    @property
    def corrupted(self) -> tuple[DemoRow, ...]:
        """The rows of the corrupted test images."""
        return tuple(row for row in self.rows if row.severity)

    def mean(self, *, severity: int | None = None, corruption: str | None = None) -> DemoRow:
        """Average the corrupted sets, optionally of one severity or one corruption only."""
        chosen = [
            row for row in self.corrupted if severity in (None, row.severity) and corruption in (None, row.corruption)
        ]
        return DemoRow(
            "mean", severity or 0, {name: fmean(r.accuracy[name] for r in chosen) for name in (PLAIN, *RULES)}
        )


def run(
    model: nn.Module,
    correction: trueup.Correction = PAPERS_MNIST,
    *,
    images: int = digits.TEST,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Result:
    """Calibrate `model` and correct it with `correction` and with the setting that calibration chose.

    Each of the three is tested on `images` digits, clean and under every corruption and severity.
    """
    began = time.perf_counter()
    clean = digits.load("train").images
    targets = trueup.calibrate(model, (_input(clean[k]) for k in _batches(len(clean))))
    calibration_seconds = time.perf_counter() - began
    networks = {
        PLAIN: model,
        "correction": trueup.correct(model, targets, correction),
        "evidence": trueup.correct(model, targets),
    }

    test = digits.load("test").first(images)
    cases = [("clean", 0), *((name, severity) for name in CORRUPTIONS for severity in SEVERITIES)]
    rows, examples, seconds = [], {}, dict.fromkeys(networks, 0.0)
    for done, (name, severity) in enumerate(cases):
        progress(done, len(cases))
        pixels = test.images if name == "clean" else corrupt(test.images, name, severity, family="mnist-c")
        accuracies = {}
        for which, network in networks.items():
            began = time.perf_counter()
            accuracies[which] = accuracy(network, Images(pixels, test.labels))
            seconds[which] += time.perf_counter() - began
        rows.append(DemoRow(name, severity, accuracies))
        examples[name] = pixels[0, 0]  # keeps the last severity
    progress(len(cases), len(cases))
    ms = {which: 1000 * total / (len(cases) * len(test)) for which, total in seconds.items()}
    return Result(tuple(rows), examples, len(test), calibration_seconds, ms)


def load() -> nn.Module:
    """Load the network that comes with the package."""
    return models.load(MODEL)


def retrain(report: Callable[[TrainingProgress], None] = lambda _: None) -> nn.Module:
    """Train the same network from scratch: about a minute on two cores."""
    choices = Choices("digits", "bn", (0,), RECIPES["digits"])
    trained = train(choices, digits.load("train"), digits.load("test"), Engine("cpu"), report=report)
    assert trained is not None  # only a time limit stops training early
    return trained[0]


@torch.inference_mode()
def accuracy(network: nn.Module, data: Images) -> float:
    """Return the accuracy of `network` on `data` in percent."""
    right = sum(
        int((network(_input(data.images[k])).argmax(dim=1) == data.labels[k]).sum()) for k in _batches(len(data))
    )
    return 100 * right / len(data)


def _batches(count: int) -> list[slice]:
    return [slice(start, start + BATCH) for start in range(0, count, BATCH)]


def _input(pixels: Tensor) -> Tensor:
    return NORMALISATION["digits"](pixels)
