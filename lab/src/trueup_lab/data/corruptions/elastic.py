"""Elastic transform: a random affine map, then a smooth random displacement."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trueup_lab.data.corruptions import linear
from trueup_lab.data.corruptions.rng import ImageRng
from trueup_lab.data.corruptions.warp import bilinear, pixel_grid


def elastic_transform(x: Tensor, rng: ImageRng, strength: float, sigma: float, jitter: float, *, side: int) -> Tensor:
    """Move three points by up to `jitter` pixels, then every pixel by `strength` times blurred noise.

    The constants hold for images whose short side is `side` pixels, and grow with the short side.
    """
    height, width = x.shape[-2:]
    growth = min(height, width) / side
    strength, sigma, jitter = strength * growth, sigma * growth, jitter * growth
    rows, cols = pixel_grid(height, width, x.device)
    inverse = torch.from_numpy(_inverse_maps(rng, height, width, jitter)).float().to(x.device)
    (a, b, c), (d, e, f) = inverse.permute(1, 2, 0).view(2, 3, -1, 1, 1)
    # OpenCV's warpAffine rounds positions to 1/32 pixel
    col = (a * cols + b * rows + c).mul_(32).round_().div_(32)
    row = (d * cols + e * rows + f).mul_(32).round_().div_(32)
    mapped = bilinear(x, row, col, "mirror")
    if strength == 0:
        return mapped
    vertical, horizontal = (
        linear.gaussian(size, sigma, x.device, border="reflect", truncate=3.0) for size in (height, width)
    )
    noise = rng.uniform(1, 2 * height * width).mul_(2).sub_(1).view(-1, 2, height, width)
    right, down = (linear.separable(noise, vertical, horizontal) * strength).float().unbind(1)
    return bilinear(mapped, rows + down, cols + right, "reflect")


def _inverse_maps(rng: ImageRng, height: int, width: int, jitter: float) -> np.ndarray:
    """Affine maps (images, 2, 3) from a pixel of the result to its place in the image, as (column, row)."""
    middle, third = np.array([width // 2, height // 2]), min(height, width) // 3
    corners = np.array([[third, third], [third, -third], [-third, -third]], dtype=np.float64) + middle
    moved = corners + (rng.fraction(0, 6).numpy().reshape(-1, 3, 2) * 2 - 1) * jitter
    homogeneous = np.concatenate([moved, np.ones((len(moved), 3, 1))], axis=2)
    return np.linalg.solve(homogeneous, np.broadcast_to(corners, moved.shape)).transpose(0, 2, 1)
