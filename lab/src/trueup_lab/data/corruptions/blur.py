"""Defocus and zoom blur, the same for every image."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trueup_lab.data.corruptions import linear
from trueup_lab.data.corruptions.arithmetic import ONE, quantise

_DENSE = 32  # up to this size, one matrix per plane is faster than one per axis and zoom factor


def defocus_blur(x: Tensor, radius: float, alias_blur: float) -> Tensor:
    """Convolve bytes with a smoothed disk, mirrored at the border (the edge itself not repeated).

    A row of the disk is a difference of two running sums. All sums are exact.
    """
    disk, smooth, rest = _disk(radius, alias_blur)
    height, width = x.shape[-2:]
    far = len(disk) // 2
    near = len(smooth) // 2
    reach = far + near
    padded = F.pad(x.float(), (reach,) * 4, mode="reflect")
    sums = F.pad(padded.cumsum(-1), (1, 0))
    rows, cols = height + 2 * near, width + 2 * near
    total = torch.zeros(*x.shape[:-2], rows, cols, device=x.device)
    for half in set(disk):
        run = sums[..., far + half + 1 : far + half + 1 + cols] - sums[..., far - half : far - half + cols]
        for row in (row for row, width_of in enumerate(disk) if width_of == half):
            total += run[..., row : row + rows, :]
    if near:
        total = linear.along(linear.along(total.double(), smooth, -1, width), smooth, -2, height)
    total = (total / float(sum(2 * half + 1 for half in disk))).float()
    if rest:
        added = torch.zeros_like(x, dtype=torch.float32)
        for row, col, weight in rest:
            added.add_(padded[..., row : row + height, col : col + width], alpha=weight)
        total += added
    return total


def zoom_blur(x: Tensor, stop: float, step: float) -> Tensor:
    """Average the image and its zooms by 1, 1 + step, ... below `stop`."""
    factors = tuple(np.arange(1, stop, step).tolist())  # arange's rounding decides whether `stop` is in
    height, width = x.shape[-2:]
    if max(height, width) <= _DENSE:
        return (x.flatten(2).float() @ _all_zooms(height, width, factors, x.device)).view(x.shape)
    total = x.float()
    for factor in factors:
        matrix = linear.zoom(width, factor, x.device).float()
        low, high, part = linear.zoom_taps(height, factor, x.device)
        wide = x.float() @ matrix.T  # exact: sums of bytes times multiples of 2**-16 take 24 bits
        total += wide.index_select(-2, low) * (1 - part)
        total += wide.index_select(-2, high) * part
    return total / (len(factors) + 1)


@lru_cache(maxsize=16)
def _all_zooms(height: int, width: int, factors: tuple[float, ...], device: torch.device) -> Tensor:
    """Zoom blur as one (pixels, pixels) matrix, exact on bytes in float32."""
    cpu = torch.device("cpu")
    total = torch.eye(height * width, dtype=torch.float64)
    for factor in factors:
        total += torch.kron(linear.zoom(height, factor, cpu), linear.zoom(width, factor, cpu))
    return quantise(total / (len(factors) + 1)).float().T.contiguous().to(device)


@lru_cache(maxsize=32)
def _disk(radius: float, alias_blur: float) -> tuple[list[int], list[float], list[tuple[int, int, float]]]:
    """Return the half-widths of the disk's rows, the weights that smooth it, and corrections (row, column, weight).

    The originals draw the disk on a canvas 17 wide (2 r + 1 for a radius above 8) and smooth it with OpenCV, which
    mirrors at the canvas' edge. Where the disk touches that edge, a few weights differ from those of a smoothed disk,
    and the weights add up to as much as 1.013; the corrections are these differences.
    """
    reach, width = (8, 3) if radius <= 8 else (int(radius), 5)
    far = int(radius)
    halves = [int((radius**2 - row**2) ** 0.5) for row in range(-far, far + 1)]
    taps = torch.arange(width, dtype=torch.float64) - width // 2
    bell = torch.exp(-(taps**2) / (2 * alias_blur**2))
    smooth = quantise(bell / bell.sum())
    smooth = quantise(smooth[smooth > 2**-11].unsqueeze(0))[0]  # the outermost of 5 weighs less than 0.1 grey levels

    def smoothed(canvas: int, mode: str) -> Tensor:
        at = torch.arange(-canvas, canvas + 1, dtype=torch.float64)
        disk = (at[:, None] ** 2 + at**2 <= radius**2).double()
        padded = F.pad((disk / disk.sum())[None, None], (len(smooth) // 2,) * 4, mode=mode)
        return F.conv2d(F.conv2d(padded, smooth.view(1, 1, 1, -1)), smooth.view(1, 1, -1, 1))[0, 0]

    near = len(smooth) // 2
    plain = smoothed(far + near, "constant")
    theirs = smoothed(reach, "reflect")
    rest = F.pad(theirs, (far + near - reach,) * 4) - plain  # negative padding trims
    rest = torch.where(rest.abs() < 2**-13, 0, rest * ONE).round() / ONE  # smaller ones add up to 0.05 grey levels
    odd = [(row, col, float(rest[row, col])) for row, col in rest.nonzero().tolist()]
    return halves, smooth.tolist(), odd
