"""MNIST-C's geometry: shear, rotate, scale and translate, about the middle of the image, black outside."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueup_lab.data.corruptions.draws import Draws
from trueup_lab.data.corruptions.warp import bilinear, pixel_grid


def shear(x: Tensor, draws: Draws, radians: float) -> Tensor:
    """Shear left or right."""
    return _about_the_middle(x, draws, ((1, math.tan(radians)), (0, 1)), ((1, -math.tan(radians)), (0, 1)))


def rotate(x: Tensor, draws: Draws, radians: float) -> Tensor:
    """Rotate either way."""
    cos, sin = math.cos(radians), math.sin(radians)
    return _about_the_middle(x, draws, ((cos, -sin), (sin, cos)), ((cos, sin), (-sin, cos)))


def scale(x: Tensor, draws: Draws, factor: float) -> Tensor:
    """Shrink to `factor` of the size."""
    maps = ((1 / factor, 0), (0, 1 / factor))
    return _about_the_middle(x, draws, maps, maps)


def translate(x: Tensor, draws: Draws, pixels: int) -> Tensor:
    """Move by whole pixels, left or right and up or down. Bytes."""
    height, width = x.shape[-2:]
    padded = torch.nn.functional.pad(x, (pixels,) * 4)
    corner = draws.choice(0, 4)
    out = torch.empty_like(x)
    for k in range(4):
        chosen = (corner == k).nonzero()[:, 0].to(x.device)
        top, left = 2 * pixels * (k // 2), 2 * pixels * (k % 2)
        out[chosen] = padded[chosen, :, top : top + height, left : left + width]
    return out


_Map = tuple[tuple[float, float], tuple[float, float]]


def _about_the_middle(x: Tensor, draws: Draws, one: _Map, other: _Map) -> Tensor:
    """Sample each image at `one` or `other` (column, row) -> (column, row), with equal chances."""
    height, width = x.shape[-2:]
    rows, cols = pixel_grid(height, width, x.device)
    down, right = rows - (height - 1) / 2, cols - (width - 1) / 2
    maps = torch.tensor([one, other])[draws.choice(0, 2)].to(x.device)
    (a, b), (c, d) = maps.permute(1, 2, 0).view(2, 2, -1, 1, 1)
    return bilinear(x, c * right + d * down + (height - 1) / 2, a * right + b * down + (width - 1) / 2, "black")
