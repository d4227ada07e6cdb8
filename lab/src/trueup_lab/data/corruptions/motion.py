"""Motion blur as in ImageMagick: half a gaussian along a ray, at whole pixels."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trueup_lab.data.corruptions.arithmetic import quantise


def motion_blur(x: Tensor, degrees: Tensor, radius: int, sigma: float) -> Tensor:
    """Blur each image of bytes along its own angle (`degrees`, (images,) on the CPU). Returns rounded float32.

    Tap k of 2 radius + 1 lies k pixels along the ray, rounded to a whole pixel; edges are repeated. Images are sorted
    by angle, so that those that share a tap's offset are adjacent and each tap takes a few additions of slices. The
    sums are exact (bytes times multiples of 2**-16).
    """
    weights = _weights(radius, sigma)
    order = degrees.argsort()
    rows, cols = _offsets(degrees[order], len(weights))
    height, width = x.shape[-2:]
    reach = int(max(np.abs(rows).max(), np.abs(cols).max()))
    place = order.to(x.device)
    padded = F.pad(x.index_select(0, place).float(), (reach,) * 4, mode="replicate")
    total = torch.zeros_like(x, dtype=torch.float32)
    for weight, row, col in zip(weights, rows.T, cols.T, strict=True):
        for first, last in _runs(row, col):
            top, left = reach + int(row[first]), reach + int(col[first])
            window = padded[first:last, :, top : top + height, left : left + width]
            total[first:last].add_(window, alpha=weight)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return total.add_(0.5).floor_().index_select(0, back.to(x.device))


def _weights(radius: int, sigma: float) -> list[float]:
    taps = torch.arange(2 * radius + 1, dtype=torch.float64)
    weights = torch.exp(-(taps**2) / (2 * sigma**2))
    kept: list[float] = quantise(weights / weights.sum()).tolist()
    while kept[-1] == 0:
        kept.pop()
    return kept


def _offsets(degrees: Tensor, taps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and column offset of each tap, (images, taps) each."""
    radians = degrees.double().numpy() * (math.pi / 180)
    along = np.arange(taps)
    rows = np.ceil(np.sin(radians)[:, None] * along - 0.5).astype(np.int64)
    cols = np.ceil(np.cos(radians)[:, None] * along - 0.5).astype(np.int64)
    return rows, cols


def _runs(row: np.ndarray, col: np.ndarray) -> list[tuple[int, int]]:
    """Return the start and end of each run of images with the same offset."""
    change = np.flatnonzero((np.diff(row) != 0) | (np.diff(col) != 0)) + 1
    edges = [0, *change.tolist(), len(row)]
    return list(pairwise(edges))
