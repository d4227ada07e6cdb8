"""Street scenes that are drawn, with a class for every pixel: a set for segmentation that needs no download."""

from __future__ import annotations

import numpy as np
import torch

from trueup_lab.data.images import Images, Split
from trueup_lab.data.root import DataRoot
from trueup_lab.data.scenes.classes import CLASSES, COLOURS
from trueup_lab.data.scenes.street import Scene, draw_street
from trueup_lab.data.scenes.weather import WEATHERS, Weather, apply_weather

__all__ = ["CLASSES", "COLOURS", "WEATHERS", "Scene", "Weather", "apply_weather", "draw_scenes", "draw_street", "load"]

TRAIN, TEST = 1200, 160
"""Number of training and test scenes."""

FIRST = {"train": 0, "test": 1_000_000}
"""Number of the first scene of a split: no scene is in both."""


def load(split: Split, root: DataRoot = None) -> Images:
    """Draw the training or test scenes, (N, 3, 128, 224), with labels (N, 128, 224). `root` is ignored."""
    del root
    if split not in FIRST:
        raise ValueError(f"unknown split {split!r} of scenes; known: train, test")
    return as_images(draw_scenes(split, TRAIN if split == "train" else TEST))


def draw_scenes(split: Split, count: int) -> list[Scene]:
    """Draw the first `count` scenes of a split."""
    return [draw_street(FIRST[split] + k) for k in range(count)]


def as_images(scenes: list[Scene]) -> Images:
    """Pictures and masks as tensors."""
    pictures = torch.from_numpy(np.stack([scene.image for scene in scenes])).permute(0, 3, 1, 2).contiguous()
    return Images(pictures, torch.from_numpy(np.stack([scene.mask for scene in scenes])))
