"""MNIST-C's strokes: a dotted line or a zigzag over the digit, or inverted outer stripes.

There are only a few hundred lines, so all are drawn once and each image picks one.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from trueup_lab.data.corruptions.rng import ImageRng

_SIZE = 28
_ROWS = 27  # rows where a line may start or end
_SLANTS = 10  # a zigzag ends 5 rows above its start to 4 below
_REACH = 2.3  # pixels from its centre at which a line has faded


def dotted_line(x: Tensor, rng: ImageRng) -> Tensor:
    """Add a line from edge to edge: two pixels drawn, two left out."""
    which = rng.choice(0, _ROWS) * _ROWS + rng.choice(1, _ROWS)
    return x + _dotted(x.device)[which.to(x.device)].unsqueeze(1)


def zigzag(x: Tensor, rng: ImageRng) -> Tensor:
    """Add a zigzag of amplitude 2 pixels along a nearly horizontal line."""
    which = rng.choice(0, _ROWS) * _SLANTS + rng.choice(1, _SLANTS)
    return x + _zigzags(x.device)[which.to(x.device)].unsqueeze(1)


def stripe(x: Tensor) -> Tensor:
    """Invert the left and the right quarter. Returns uint8."""
    quarter = x.shape[-1] // 4
    out = x.clone()
    out[..., :quarter] = 255 - x[..., :quarter]
    out[..., -quarter:] = 255 - x[..., -quarter:]
    return out


@lru_cache(maxsize=8)
def _dotted(device: torch.device) -> Tensor:
    drawn = np.arange(_SIZE) // 2 % 2 == 1
    lines = [_line(0, r0, _SIZE - 1, r1) * drawn for r0 in range(_ROWS) for r1 in range(_ROWS)]
    return torch.from_numpy(np.stack(lines) * 255).float().to(device)


@lru_cache(maxsize=8)
def _zigzags(device: torch.device) -> Tensor:
    drawn = [_zigzag(r0, slant - 5) for r0 in range(_ROWS) for slant in range(_SLANTS)]
    return torch.from_numpy(np.stack(drawn) * 255).float().to(device)


def _line(c0: float, r0: float, c1: float, r1: float) -> np.ndarray:
    """Draw a line between two columns that fades with the vertical distance d as 1 + log(1 - d / 2.3)."""
    cols = np.arange(_SIZE)
    if c0 == c1:
        return np.zeros((_SIZE, _SIZE))
    centre = (r1 - r0) / (c1 - c0) * (cols - c0) + r0
    distance = np.abs(np.arange(_SIZE)[:, None] - centre).clip(max=_REACH - 1e-10)
    shade = (np.log(1 - distance / _REACH) + 1).clip(0, 1)
    return np.where((cols >= math.floor(c0)) & (cols < math.ceil(c1)), shade, 0.0)


def _zigzag(start: int, slant: int) -> np.ndarray:
    first, last, pitch = 2, 25, 2.0
    angle = math.atan(slant / (last - first))
    length = (last - first) / math.cos(angle)
    teeth = int((length - pitch) // (2 * pitch)) + 1
    corners = [(0.0, 0.0)] + [((2 * k + 1) * pitch, (-1) ** k * pitch) for k in range(teeth)]
    whole = 2 * pitch * (length // (2 * pitch))
    if length != whole:
        corners.append((length, corners[-1][1] / (2 * (length - whole))))
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    cols, rows = turn @ np.array(corners).T + np.array([[first], [start]])
    sides = zip(cols[:-1], rows[:-1], cols[1:], rows[1:], strict=True)
    drawn: np.ndarray = np.stack([_line(*side) for side in sides]).sum(0)
    return drawn
