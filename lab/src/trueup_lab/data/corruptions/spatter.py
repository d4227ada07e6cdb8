"""Spatter: drops of water or mud on the lens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trueup_lab.data.corruptions.edges import opencv_canny
from trueup_lab.data.corruptions.linear import gaussian_blur
from trueup_lab.data.corruptions.rng import ImageRng

_WATER = (175.0, 238.0, 238.0)
_MUD = (63.0, 42.0, 20.0)
# OpenCV's 5 x 5 chamfer distance: a step along an axis, a diagonal, a knight's move, in 16.16 fixed point
_STRAIGHT, _DIAGONAL, _KNIGHT = (round(d * 2**16) for d in (1.0, 1.4, 2.1969))
_FAR = 20  # pixels; larger distances have no effect


def water(
    x: Tensor, rng: ImageRng, mean: float, deviation: float, sigma: float, threshold: float, opacity: float
) -> Tensor:
    """Add pale drops with bright edges."""
    liquid = _liquid(x, rng, mean, deviation, sigma)
    layer = torch.where(liquid < threshold, 0.0, liquid).mul_(255).int()
    drops = (layer * drop_relief(layer)).float()
    drops = drops / drops.amax((2, 3), keepdim=True).clamp(min=1) * opacity
    return x + drops * torch.tensor(_WATER, device=x.device).view(1, 3, 1, 1)


def mud(x: Tensor, rng: ImageRng, mean: float, deviation: float, sigma: float, threshold: float, blur: float) -> Tensor:
    """Cover the image with brown drops; grey images get the red value of mud."""
    drops = (_liquid(x, rng, mean, deviation, sigma) > threshold).double()
    cover = gaussian_blur(drops, blur)
    cover = torch.where(cover < 0.8, 0.0, cover).float()
    colour = torch.tensor(_MUD[: x.shape[1]], device=x.device).view(1, -1, 1, 1)
    return x * (1 - cover) + colour * cover


def drop_relief(layer: Tensor) -> Tensor:
    """Return the relief of drops, 0 to 255: an embossed map of the distance to their edges (int32, like `layer`)."""
    distance = distance_to(opencv_canny(layer, 50, 150)).clamp_(max=_FAR * 2**16)
    level = _box(distance.double()).div_(2**16).to(torch.uint8)  # truncated: 0 to 20
    equal = _equalised(level)
    embossed = _emboss(equal.float()).clamp_(0, 255)
    return _box(embossed).round_().int()


def distance_to(edges: Tensor) -> Tensor:
    """Chamfer distance to the nearest of `edges` (..., h, w) in 16.16 fixed point, exact up to 20 pixels.

    The steps of a shortest path commute, so the eight directions are taken one after another, each with doubling
    step lengths 1, 2, 4, ...
    """
    away = torch.where(edges, 0, 64 * 2**16).int()
    spare = torch.empty_like(away)
    for down, right, cost in (
        (0, 1, _STRAIGHT),
        (1, 0, _STRAIGHT),
        (1, 1, _DIAGONAL),
        (1, -1, _DIAGONAL),
        (1, 2, _KNIGHT),
        (2, 1, _KNIGHT),
        (1, -2, _KNIGHT),
        (2, -1, _KNIGHT),
    ):
        times = 1
        while times * cost <= _FAR * 2**16:
            for sign in (times, -times):
                _relax(away, down * sign, right * sign, cost * times, spare)
            times *= 2
    return away


def _liquid(x: Tensor, rng: ImageRng, mean: float, deviation: float, sigma: float) -> Tensor:
    height, width = x.shape[-2:]
    noise = rng.normal(0, height * width).view(-1, 1, height, width)
    return gaussian_blur(noise, sigma) * deviation + mean


def _relax(away: Tensor, down: int, right: int, cost: int, spare: Tensor) -> None:
    """Lower `away` to its value `down` rows and `right` columns off plus `cost`, where that is less."""
    height, width = away.shape[-2:]
    if abs(down) >= height or abs(right) >= width:
        return
    here = away[..., max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
    there = away[..., max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)]
    longer = torch.add(there, cost, out=spare[..., : here.shape[-2], : here.shape[-1]])
    torch.minimum(here, longer, out=here)


def _box(x: Tensor) -> Tensor:
    """Average 3 x 3 pixels, mirrored at the border. Sums are exact."""
    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    rows = padded[..., :-2, :] + padded[..., 1:-1, :] + padded[..., 2:, :]
    return (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]) / 9


def _equalised(level: Tensor) -> Tensor:
    """Equalise levels 0 to 20 as OpenCV's `equalizeHist`: a level becomes the share of pixels up to it."""
    flat = level.flatten(1).long()
    total = flat.shape[1]
    count = torch.zeros(len(flat), _FAR + 1, dtype=torch.int32, device=level.device)
    count.scatter_add_(1, flat, torch.ones_like(count[:, :1]).expand_as(flat))
    below = count.cumsum(1)
    lowest = below.gather(1, flat.amin(1, keepdim=True))
    scale = 255.0 / (total - lowest).clamp(min=1)
    table = ((below - lowest).clamp_(min=0) * scale.float()).round_().int()
    # an image with a single level stays unchanged
    table = torch.where(lowest == total, torch.arange(_FAR + 1, device=level.device, dtype=torch.int32), table)
    return table.gather(1, flat).view_as(level)


def _emboss(x: Tensor) -> Tensor:
    """Correlate with ((-2, -1, 0), (-1, 1, 1), (0, 1, 2)), mirrored at the border."""
    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    height, width = x.shape[-2:]

    def at(row: int, col: int) -> Tensor:
        return padded[..., 1 + row : 1 + row + height, 1 + col : 1 + col + width]

    return x - 2 * at(-1, -1) - at(-1, 0) - at(0, -1) + at(0, 1) + at(1, 0) + 2 * at(1, 1)
