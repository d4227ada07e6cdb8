"""The picture of the demonstration of segmentation: scene, weather, answer as trained, answer corrected."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from trueup_lab.data.scenes import CLASSES, COLOURS
from trueup_lab.demo.scenes import Example
from trueup_lab.figures.style import pyplot

NAMES = {"fog": "fog", "dusk": "dusk", "rain": "rain", "noise": "camera noise"}


def draw_scenes_demo(examples: Sequence[Example], path: str | os.PathLike[str]) -> None:
    """Draw one line per example, and the colours of the classes below."""
    plt = pyplot()
    height, width = examples[0].truth.shape
    wide = 11.0
    tall = wide / 4 * height / width * len(examples) + 0.25 * len(examples) + 0.3
    figure, axes = plt.subplots(len(examples), 4, figsize=(wide, tall), squeeze=False)
    for line, example in zip(axes, examples, strict=True):
        before, after = example.scores
        panels = (
            (example.picture, f"{NAMES.get(example.weather, example.weather)}"),
            (_coloured(example.truth), "truth"),
            (_coloured(example.as_trained), f"as trained: {before:.0f} mIoU"),
            (_coloured(example.corrected), f"with trueup: {after:.0f} mIoU"),
        )
        for axis, (picture, title) in zip(line, panels, strict=True):
            axis.imshow(picture, interpolation="lanczos" if picture is example.picture else "nearest")
            axis.set_title(title, fontsize=10, loc="left", pad=3)
            axis.set_axis_off()
    patches = [
        plt.Rectangle((0, 0), 1, 1, facecolor=np.array(c) / 255, edgecolor="#888888", linewidth=0.4) for c in COLOURS
    ]
    figure.subplots_adjust(left=0.005, right=0.995, top=1 - 0.25 / tall, bottom=0.32 / tall, wspace=0.02, hspace=0.14)
    figure.legend(
        patches, CLASSES, loc="lower center", ncols=len(CLASSES), frameon=False, fontsize=9,
        handlelength=1.2, columnspacing=1.6, borderaxespad=0.1,
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _coloured(mask: np.ndarray) -> np.ndarray:
    picture: np.ndarray = np.array(COLOURS, np.uint8)[mask]
    return picture
