"""Canny edge detection, in the two forms that the originals use: scikit-image's and OpenCV's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup_lab.data.corruptions.arithmetic import ONE


def canny_edges(x: Tensor) -> Tensor:
    """Draw white edges on black, as `skimage.feature.canny(x / 255)` finds them (sigma 1, thresholds 0.1, 0.2)."""
    height, width = x.shape[-2:]
    vertical, horizontal = _dark_gaussian(height, x.device), _dark_gaussian(width, x.device)
    covered = vertical.sum(1)[:, None] * horizontal.sum(1)  # divides out the weight of the black border
    smooth = vertical @ (x.double() @ horizontal.T) / covered
    padded = F.pad(smooth, (1, 1, 1, 1), mode="replicate")
    right, down = _sobel(padded)
    strength = (down * down + right * right).sqrt()
    steep, flat = down.abs(), right.abs()
    falling = down * right >= 0  # the gradient lies in the quadrants of the main diagonal
    vertical = torch.where(falling, steep > flat, steep >= flat)
    share = torch.where(vertical, flat, steep) / torch.where(vertical, steep, flat).clamp(min=1e-30)
    around = F.pad(strength, (1, 1, 1, 1))

    def at(row: int, col: int) -> Tensor:
        return around[..., 1 + row : 1 + row + height, 1 + col : 1 + col + width]

    highest = torch.ones_like(falling)
    for sign in (1, -1):
        straight = torch.where(vertical, at(sign, 0), torch.where(falling, at(0, sign), at(0, -sign)))
        diagonal = torch.where(falling, at(sign, sign), at(sign, -sign))
        highest &= straight * (1 - share) + diagonal * share <= strength
    inner = torch.zeros_like(highest)
    inner[..., 1:-1, 1:-1] = True
    weak = highest & inner & (strength >= 0.1 * 255)
    return connected(weak & (strength >= 0.2 * 255), weak).to(torch.uint8) * 255


def opencv_canny(x: Tensor, low: int, high: int) -> Tensor:
    """Return edges (bool) as `cv2.Canny(x, low, high)` finds them in `x` (int32)."""
    height, width = x.shape[-2:]
    right, down = _sobel(F.pad(x.float(), (1, 1, 1, 1), mode="replicate"))
    right, down = right.int(), down.int()
    steep, flat = down.abs(), right.abs()
    strength = steep + flat
    around = F.pad(strength, (1, 1, 1, 1))

    def at(row: int, col: int) -> Tensor:
        return around[..., 1 + row : 1 + row + height, 1 + col : 1 + col + width]

    # tan(22.5 degrees) in 15 bits, and tan(67.5 degrees) = tan(22.5 degrees) + 2
    shallow = flat * round(math.tan(math.pi / 8) * 2**15)
    level = steep * 2**15 < shallow
    upright = steep * 2**15 > shallow + flat * 2**16
    sloping = ~(level | upright)
    opposed = (right ^ down) < 0
    # along an axis the second comparison admits equality, along a diagonal neither does
    kept = level & (strength > at(0, -1)) & (strength >= at(0, 1))
    kept |= upright & (strength > at(-1, 0)) & (strength >= at(1, 0))
    kept |= sloping & opposed & (strength > at(-1, 1)) & (strength > at(1, -1))
    kept |= sloping & ~opposed & (strength > at(-1, -1)) & (strength > at(1, 1))
    weak = kept & (strength > low)
    return connected(weak & (strength > high), weak)


def connected(seeds: Tensor, region: Tensor) -> Tensor:
    """Return the parts of `region` that are 8-connected to a seed. All bool, (..., h, w)."""
    grown = seeds.clone()
    while True:
        before = grown.clone()
        for _ in range(8):  # testing for the end synchronises a GPU, so not at every step
            wide = grown.clone()
            wide[..., 1:] |= grown[..., :-1]
            wide[..., :-1] |= grown[..., 1:]
            grown |= wide
            grown[..., 1:, :] |= wide[..., :-1, :]
            grown[..., :-1, :] |= wide[..., 1:, :]
            grown &= region
        if torch.equal(grown, before):
            return grown


def _sobel(padded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Sobel gradients to the right and down."""
    across = padded[..., :, 2:] - padded[..., :, :-2]
    along = padded[..., 2:, :] - padded[..., :-2, :]
    right = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    down = along[..., :, :-2] + 2 * along[..., :, 1:-1] + along[..., :, 2:]
    return right, down


def _dark_gaussian(size: int, device: torch.device) -> Tensor:
    """Matrix of a gaussian blur of sigma 1 with zeros outside. Weights are multiples of 2**-16, so sums are exact."""
    at = torch.arange(size, dtype=torch.float64)
    apart = at[:, None] - at
    weights = torch.exp(-0.5 * apart**2) * (apart.abs() <= 4)
    whole = torch.exp(-0.5 * torch.arange(-4, 5, dtype=torch.float64) ** 2).sum()
    return ((weights / whole * ONE).round() / ONE).to(device)
