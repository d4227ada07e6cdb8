"""Similarity of two versions of a corrupted set: pixel by pixel, and in distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_WITHOUT_CHANCE_IN_COLOUR = frozenset(
    ("brightness", "contrast", "defocus_blur", "gaussian_blur", "jpeg_compression", "pixelate", "saturate", "zoom_blur")
)
WITHOUT_CHANCE = {
    "cifar10-c": _WITHOUT_CHANCE_IN_COLOUR,
    "imagenet-c": _WITHOUT_CHANCE_IN_COLOUR,
    "mnist-c": frozenset(("identity", "scale", "brightness", "stripe", "canny_edges")),
}
"""The corruptions of each family without random numbers, which can be compared pixel by pixel."""


class Change(NamedTuple):
    """Effect of a corruption in grey levels: statistics per image, averaged over the images."""

    mean: float
    spread: float  # standard deviation
    correlation: float  # of neighbouring pixels' changes, to the right and down


def within(ours: Tensor, theirs: Tensor) -> float:
    """Return the share of values (uint8) that differ by at most two levels.

    >>> within(torch.tensor([0, 10], dtype=torch.uint8), torch.tensor([2, 13], dtype=torch.uint8))
    0.5
    """
    return float(((ours.int() - theirs.int()).abs() <= 2).double().mean())


def change(clean: Tensor, corrupted: Tensor) -> Change:
    """Measure the change from `clean` to `corrupted`, both (N, C, H, W) uint8."""
    difference = corrupted.double() - clean.double()
    mean = difference.mean((1, 2, 3))
    spread = difference.flatten(1).std(1, correction=0)
    centred = difference - mean.view(-1, 1, 1, 1)
    variance = centred.square().mean((1, 2, 3)).clamp(min=1e-12)
    right = (centred[..., 1:] * centred[..., :-1]).mean((1, 2, 3)) / variance
    down = (centred[..., 1:, :] * centred[..., :-1, :]).mean((1, 2, 3)) / variance
    return Change(float(mean.mean()), float(spread.mean()), float(torch.cat((right, down)).mean()))
