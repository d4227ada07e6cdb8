"""The demonstration: handwritten digits, a small network, and what both rules do under nine corruptions.

The main job in one piece, on data and a checkpoint that need no download: load a model, calibrate it on its clean
training images, correct it by each rule, and compare all three on the same corrupted test images.
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
from trueup_lab.training.run import Choices, Progress, train

MODEL = "resnet20-bn-digits"
PAPERS_MNIST = trueup.Correction(lambda1=0.75, lambda2=0.25, iterations=2)
"""What the paper uses for MNIST with batch norm."""

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
class Row:
    """One test set: its corruption (`clean` for none), and the accuracies as trained and by each rule, in percent."""

    corruption: str
    severity: int  # 0 for clean
    accuracy: Mapping[str, float]  # of PLAIN and each of RULES

    def gain(self, rule: str) -> float:
        """Percentage points won by a rule."""
        return self.accuracy[rule] - self.accuracy[PLAIN]


@dataclass(frozen=True)
class Result:
    """What the demonstration saw."""

    rows: tuple[Row, ...]
    examples: dict[str, Tensor]  # a corruption -> one image at the highest severity (28, 28) uint8
    images: int  # in each test set
    calibration_seconds: float
    ms: Mapping[str, float]  # an image, of PLAIN and each of RULES

    @property
    def clean(self) -> Row:
        """The row of the clean test images."""
        return next(row for row in self.rows if row.severity == 0)

    @property
    def corrupted(self) -> tuple[Row, ...]:
        """All others."""
        return tuple(row for row in self.rows if row.severity)

    def mean(self, *, severity: int | None = None, corruption: str | None = None) -> Row:
        """The mean over the corrupted sets of one severity or one corruption, or of all."""
        chosen = [
            row for row in self.corrupted if severity in (None, row.severity) and corruption in (None, row.corruption)
        ]
        return Row("mean", severity or 0, {name: fmean(r.accuracy[name] for r in chosen) for name in (PLAIN, *RULES)})


def run(
    model: nn.Module,
    correction: trueup.Correction = PAPERS_MNIST,
    *,
    images: int = digits.TEST,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Result:
    """Calibrate `model` and correct it, by `correction` and by `Evidence()`, which is the default of `trueup.correct`.

    All three are tested on `images` digits, clean and under every corruption and severity.
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
        rows.append(Row(name, severity, accuracies))
        examples[name] = pixels[0, 0]  # the last severity stays
    progress(len(cases), len(cases))
    ms = {which: 1000 * total / (len(cases) * len(test)) for which, total in seconds.items()}
    return Result(tuple(rows), examples, len(test), calibration_seconds, ms)


def load() -> nn.Module:
    """The network that comes with the package."""
    return models.load(MODEL)


def retrain(report: Callable[[Progress], None] = lambda _: None) -> nn.Module:
    """The same network, trained again from scratch: about a minute on two cores."""
    choices = Choices("digits", "bn", (0,), RECIPES["digits"])
    trained = train(choices, digits.load("train"), digits.load("test"), Engine("cpu"), report=report)
    assert trained is not None  # nothing stops it early without a time limit
    return trained[0]


@torch.inference_mode()
def accuracy(network: nn.Module, data: Images) -> float:
    """The share of `data` that `network` has right, in percent."""
    right = sum(
        int((network(_input(data.images[k])).argmax(dim=1) == data.labels[k]).sum()) for k in _batches(len(data))
    )
    return 100 * right / len(data)


def _batches(count: int) -> list[slice]:
    return [slice(start, start + BATCH) for start in range(0, count, BATCH)]


def _input(pixels: Tensor) -> Tensor:
    return NORMALISATION["digits"](pixels)
