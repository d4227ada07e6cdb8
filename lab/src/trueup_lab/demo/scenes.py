"""The demonstration of segmentation: a small network on drawn street scenes, in fog, dusk, rain and noise.

It needs no download: draw scenes that the network has not seen, calibrate on them without labels, correct the network
with the setting that calibration chose, and compare it with the network as trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

import trueup
from trueup_lab import models
from trueup_lab.data.images import NORMALISATION
from trueup_lab.data.scenes import CLASSES, WEATHERS, Scene, apply_weather, draw_street
from trueup_lab.evaluation import mean_iou
from trueup_lab.evaluation.predict import Segmented

MODEL = "unet-bn-scenes"
SEVERITIES = (1, 3, 5)
CALIBRATION, TEST = 50, 24
"""Number of clean scenes for calibration, and of scenes per test set."""

FIRST_CALIBRATION, FIRST_TEST = 2_000_000, 1_000_000
"""Numbers of the first scenes: neither is among those trained on."""

SHOWN = 9
"""The test scene in the picture: it has cars, people, trees and houses."""

BATCH = 16


@dataclass(frozen=True)
class ScenesRow:
    """Mean IoU on one test set in percent, as trained and corrected, and of each class. Weather is `clean` for none."""

    weather: str
    severity: int  # 0 for clean
    scenes: int
    as_trained: float
    corrected: float
    as_trained_by_class: str
    corrected_by_class: str

    @property
    def gain(self) -> float:
        """Points gained."""
        return self.corrected - self.as_trained


@dataclass(frozen=True)
class Example:
    """One scene in one weather, with both answers and their mean IoU on this scene."""

    weather: str
    severity: int
    clean: np.ndarray  # (height, width, 3) uint8
    picture: np.ndarray
    truth: np.ndarray  # (height, width)
    as_trained: np.ndarray
    corrected: np.ndarray
    scores: tuple[float, float]


@dataclass(frozen=True)
class ScenesResult:
    """Results of the demonstration."""

    rows: tuple[ScenesRow, ...]
    examples: tuple[Example, ...]
    targets: trueup.Targets
    calibration_seconds: float
    ms: tuple[float, float]  # per scene, as trained and corrected

    def mean(self, weather: str | None = None) -> tuple[float, float]:
        """Mean over the severities of one weather, or over all weathers: as trained and corrected."""
        chosen = [row for row in self.rows if row.severity and weather in (None, row.weather)]
        return fmean(row.as_trained for row in chosen), fmean(row.corrected for row in chosen)


def run_scenes(
    model: nn.Module,
    *,
    scenes: int = TEST,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> ScenesResult:
    """Calibrate, correct and test `model` on `scenes` scenes, clean and in every weather and severity.

    The examples show one test scene at the middle severity.
    """
    began = time.perf_counter()
    clean = (draw_street(FIRST_CALIBRATION + k).image for k in range(CALIBRATION))
    targets = trueup.calibrate(model, _batches(list(clean)), progress=False)
    calibration_seconds = time.perf_counter() - began
    robust = trueup.correct(model, targets)
    shown = min(SHOWN, scenes - 1)

    test = [draw_street(FIRST_TEST + k) for k in range(scenes)]
    cases = [("clean", 0), *((weather, severity) for weather in WEATHERS for severity in SEVERITIES)]
    rows, examples, seconds = list[ScenesRow](), list[Example](), [0.0, 0.0]
    for done, (weather, severity) in enumerate(cases):
        progress(done, len(cases))
        pictures = [
            scene.image if weather == "clean" else apply_weather(scene, weather, severity, number=k)  # type: ignore[arg-type]
            for k, scene in enumerate(test)
        ]
        both = []
        for which, network in enumerate((model, robust)):
            began = time.perf_counter()
            both.append(answers(network, pictures))
            seconds[which] += time.perf_counter() - began
        counts = [count(said, test) for said in both]
        whole, classes = zip(*(_scores(c) for c in counts), strict=True)
        rows.append(ScenesRow(weather, severity, scenes, *whole, *classes))
        if severity == SEVERITIES[len(SEVERITIES) // 2]:
            scores = tuple(_percent(c.intersection[shown], c.said[shown], c.truth[shown]) for c in counts)
            scene, said = test[shown], [one[shown].numpy() for one in both]
            examples.append(
                Example(weather, severity, scene.image, pictures[shown], scene.mask, said[0], said[1], scores)  # type: ignore[arg-type]
            )
    progress(len(cases), len(cases))
    ms = [1000 * total / (len(cases) * scenes) for total in seconds]
    return ScenesResult(tuple(rows), tuple(examples), targets, calibration_seconds, (ms[0], ms[1]))


def load_scenes_model() -> nn.Module:
    """Load the network that comes with the package."""
    return models.load(MODEL)


@torch.inference_mode()
def answers(network: nn.Module, pictures: list[np.ndarray]) -> Tensor:
    """Return logits' most likely class of each pixel `(pictures, height, width)`."""
    return torch.cat([network(x).argmax(dim=1) for x in _batches(pictures)])


def count(said: Tensor, scenes: list[Scene]) -> Segmented:
    """Count pixels by image and class, as the runner does."""
    counts = Segmented(len(said), torch.device("cpu"), len(CLASSES))
    truth = torch.from_numpy(np.stack([scene.mask for scene in scenes]))
    certain = nn.functional.one_hot(said, len(CLASSES)).permute(0, 3, 1, 2).float()
    counts.note(torch.arange(len(said)), certain, truth)
    return counts


def _scores(counts: Segmented) -> tuple[float, str]:
    columns = counts.columns(slice(None))
    return round(float(columns["mean_iou"]), 2), str(columns["iou"])


def _percent(intersection: Tensor, said: Tensor, truth: Tensor) -> float:
    return 100 * float(mean_iou(intersection, said + truth - intersection))


def _batches(pictures: list[np.ndarray]) -> list[Tensor]:
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    return [NORMALISATION["scenes"](part) for part in torch.split(pixels, BATCH)]
