"""Plasma fractals: batches of clouds by the diamond-square algorithm."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup_lab.data.corruptions.rng import ImageRng


def canvas_size(height: int, width: int) -> int:
    """Return the smallest power of two that is at least `height` and `width`.

    >>> canvas_size(224, 224), canvas_size(360, 480)
    (256, 512)
    """
    return 1 << (max(height, width) - 1).bit_length()


def plasma_fractal(rng: ImageRng, stream: int, size: int, decay: float) -> Tensor:
    """Return one periodic cloud per image, (images, size, size) float32 in [0, 1]. `size` is a power of two.

    A point half-way between four known ones takes their mean plus uniform noise. The root of the noise's amplitude
    is divided by `decay` each time the grid spacing halves.
    """
    noise = rng.uniform(stream, size * size).mul_(2).sub_(1).view(-1, size, size)
    height = torch.zeros_like(noise)
    step, wobble = size, 100.0
    while step >= 2:
        half = step // 2
        # noise is indexed by the point, so that no random number is used twice
        centre = (slice(None), slice(half, size, step), slice(half, size, step))
        top = (slice(None), slice(0, size, step), slice(half, size, step))
        left = (slice(None), slice(half, size, step), slice(0, size, step))
        corner = height[:, 0:size:step, 0:size:step]
        square = corner + corner.roll(-1, 1)
        height[centre] = (square + square.roll(-1, 2)) / 4 + noise[centre] * wobble**2
        middle = height[centre]
        height[top] = (middle + middle.roll(1, 1) + corner + corner.roll(-1, 2)) / 4 + noise[top] * wobble**2
        height[left] = (middle + middle.roll(1, 2) + corner + corner.roll(-1, 1)) / 4 + noise[left] * wobble**2
        step, wobble = half, wobble / decay
    height -= height.amin((1, 2), keepdim=True)
    return height / height.amax((1, 2), keepdim=True)
