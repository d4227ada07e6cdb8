"""Separable blurs and zooms as matrices, one per axis, which contain borders and sampling grids."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup_lab.data.corruptions.arithmetic import ONE, quantise

_SMALL = 64  # planes up to this size are blurred with matrices on a CPU too


def separable(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Return `down @ x @ across.T` for every plane of `x` (..., height, width), in float64.

    The result is exact, and so independent of the batch, where `x` holds bytes or multiples of 2**-16.
    """
    return down @ (x.double() @ across.T)


def gaussian_blur(x: Tensor, sigma: float) -> Tensor:
    """Blur planes of bytes, or of multiples of 2**-16, exactly: edges repeated, cut at four sigma. Float64.

    On a CPU, large planes are shifted and added, once per weight; others take two matrices, with the same result.
    """
    height, width = x.shape[-2:]
    if x.is_cuda or max(height, width) <= _SMALL:
        return separable(x, gaussian(height, sigma, x.device), gaussian(width, sigma, x.device))
    taps = gaussian_taps(sigma, 4.0)
    reach = len(taps) // 2
    weights = taps.tolist()
    # sums of bytes times weights take 24 bits: exact in float32 along the first axis
    padded = F.pad(x.float() if x.dtype == torch.uint8 else x.double(), (reach,) * 4, mode="replicate")
    return along(along(padded, weights, -1, width).double(), weights, -2, height)


def along(x: Tensor, weights: list[float], dim: int, size: int) -> Tensor:
    """Return the weighted sum of the windows of length `size` of `x` along `dim`."""
    total = x.narrow(dim, 0, size) * weights[0]
    for start, weight in enumerate(weights[1:], 1):
        total.add_(x.narrow(dim, start, size), alpha=weight)
    return total


@lru_cache(maxsize=64)
def gaussian(
    size: int, sigma: float, device: torch.device, *, border: str = "nearest", truncate: float = 4.0
) -> Tensor:
    """Return the (size, size) matrix of `scipy.ndimage.gaussian_filter1d` with the same border and truncation.

    >>> gaussian(4, 1.0, torch.device("cpu")).sum(1).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    taps = gaussian_taps(sigma, truncate)
    sources = torch.arange(size).unsqueeze(1) + torch.arange(len(taps)) - len(taps) // 2
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, _BORDERS[border](sources, size), taps.expand(size, -1)).to(device)


@lru_cache(maxsize=64)
def gaussian_taps(sigma: float, truncate: float) -> Tensor:
    """Weights of `scipy.ndimage.gaussian_filter1d` as multiples of 2**-16; a single weight for a sigma of 0."""
    radius = int(truncate * sigma + 0.5)
    at = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (at / sigma) ** 2) if radius else torch.ones(1, dtype=torch.float64)
    return quantise(weights / weights.sum())


@lru_cache(maxsize=256)
def zoom(size: int, factor: float, device: torch.device) -> Tensor:
    """Return the (size, size) matrix that zooms into the middle by `factor`, as the originals' `clipped_zoom` does.

    The middle ceil(size / factor) pixels are resampled linearly with aligned corners (`scipy.ndimage.zoom(order=1)`)
    and trimmed to `size` on both sides.
    """
    low, high, part = zoom_taps(size, factor, torch.device("cpu"))
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.scatter_add_(1, low.unsqueeze(1), 1 - part.double())
    return matrix.scatter_add_(1, high.unsqueeze(1), part.double()).to(device)


@lru_cache(maxsize=256)
def zoom_taps(size: int, factor: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return `zoom` as taps: (size,) indices of two pixels, and the second one's weight, (size, 1) float32."""
    kept = math.ceil(size / factor)
    first = (size - kept) // 2
    grown = round(kept * factor)
    at = torch.arange(size, dtype=torch.float64) + (grown - size) // 2
    at = at * ((kept - 1) / (grown - 1))
    low = at.floor().long().clamp_(0, kept - 1)
    part = ((at - low) * ONE).round().div(ONE).float().unsqueeze(1)
    high = (low + 1).clamp_(max=kept - 1)
    return (first + low).to(device), (first + high).to(device), part.to(device)


def _nearest(at: Tensor, size: int) -> Tensor:
    return at.clamp(0, size - 1)


def _reflect(at: Tensor, size: int) -> Tensor:
    """Mirror as d c b a | a b c d | d c b a, repeatedly."""
    at = at.remainder(2 * size)
    return torch.where(at < size, at, 2 * size - 1 - at)


_BORDERS: dict[str, Callable[[Tensor, int], Tensor]] = {"nearest": _nearest, "reflect": _reflect}
