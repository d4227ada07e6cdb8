"""MNIST-C's geometric corruptions: shear, rotate and scale about the middle, and translate. Black outside."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup_lab.data.corruptions.rng import ImageRng
from trueup_lab.data.corruptions.warp import bilinear, pixel_grid


def shear(x: Tensor, rng: ImageRng, radians: float) -> Tensor:
    """Shear left or right."""
    return _about_the_middle(x, rng, ((1, math.tan(radians)), (0, 1)), ((1, -math.tan(radians)), (0, 1)))


def rotate(x: Tensor, rng: ImageRng, radians: float) -> Tensor:
    """Rotate left or right."""
    cos, sin = math.cos(radians), math.sin(radians)
    return _about_the_middle(x, rng, ((cos, -sin), (sin, cos)), ((cos, sin), (-sin, cos)))


def scale(x: Tensor, rng: ImageRng, factor: float) -> Tensor:
    """Shrink by `factor`."""
    maps = ((1 / factor, 0), (0, 1 / factor))
    return _about_the_middle(x, rng, maps, maps)


def translate(x: Tensor, rng: ImageRng, pixels: int) -> Tensor:
    """Move left or right and up or down, by `pixels` each. Returns uint8."""
    height, width = x.shape[-2:]
    padded = torch.nn.functional.pad(x, (pixels,) * 4)
    corner = rng.choice(0, 4)
    out = torch.empty_like(x)
    for k in range(4):
        chosen = (corner == k).nonzero()[:, 0].to(x.device)
        top, left = 2 * pixels * (k // 2), 2 * pixels * (k % 2)
        out[chosen] = padded[chosen, :, top : top + height, left : left + width]
    return out


_Map = tuple[tuple[float, float], tuple[float, float]]


def _about_the_middle(x: Tensor, rng: ImageRng, one: _Map, other: _Map) -> Tensor:
    """Sample each image through the map `one` or `other`, (column, row) -> (column, row), with equal probability."""
    height, width = x.shape[-2:]
    rows, cols = pixel_grid(height, width, x.device)
    down, right = rows - (height - 1) / 2, cols - (width - 1) / 2
    maps = torch.tensor([one, other])[rng.choice(0, 2)].to(x.device)
    (a, b), (c, d) = maps.permute(1, 2, 0).view(2, 2, -1, 1, 1)
    return bilinear(x, c * right + d * down + (height - 1) / 2, a * right + b * down + (width - 1) / 2, "black")
