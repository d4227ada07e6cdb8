"""Sampling of images between pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BORDERS = {
    # name: (grid_sample's padding, align_corners)
    "black": ("zeros", True),
    "mirror": ("reflection", True),  # d c b | a b c d | c b a
    "reflect": ("reflection", False),  # d c b a | a b c d | d c b a
}


def bilinear(x: Tensor, rows: Tensor, cols: Tensor, border: str) -> Tensor:
    """Sample `x` (N, C, h, w) linearly at `rows`, `cols` (N or 1, h, w), in pixels. Returns float32."""
    padding, centred = _BORDERS[border]
    grid = torch.stack((_normal(cols, x.shape[-1], centred), _normal(rows, x.shape[-2], centred)), dim=-1).expand(
        len(x), -1, -1, -1
    )
    return F.grid_sample(x.float(), grid.float(), "bilinear", padding, align_corners=centred)


def pixel_grid(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows (h, 1) and columns (1, w) of the pixels, float32."""
    rows = torch.arange(height, device=device, dtype=torch.float32).unsqueeze(1)
    cols = torch.arange(width, device=device, dtype=torch.float32).unsqueeze(0)
    return rows, cols


def _normal(at: Tensor, size: int, centred: bool) -> Tensor:
    return at * (2 / (size - 1)) - 1 if centred else (2 * at + 1) / size - 1
