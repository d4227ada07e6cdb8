"""Glass blur: pixels trade places with nearby ones, between two gaussian blurs.

The originals walk over the pixels from the last to the first. In colour, their swap of two NumPy views copies: each
pixel takes the current value of a nearby one. In grey it swaps. Both are computed here in parallel, with exactly the
result of the sequential walk.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from trueup_lab.data.corruptions.linear import gaussian_blur
from trueup_lab.data.corruptions.rng import ImageRng

_DOUBLINGS = 6


def copying_glass_blur(x: Tensor, rng: ImageRng, sigma: float, reach: int, rounds: int) -> Tensor:
    """Colour: each pixel takes the value of one at most `reach` up or left, or `reach` - 1 down or right."""
    blurred = gaussian_blur(x, sigma).to(torch.uint8)
    source = _taken_from(rng, reach, 0, x.shape[-2:])
    for k in range(1, rounds):
        source = source.gather(1, _taken_from(rng, reach, k, x.shape[-2:]))
    moved = blurred.flatten(2).gather(2, source.unsqueeze(1).expand(-1, x.shape[1], -1))
    return gaussian_blur(moved.view_as(x), sigma)


def swapping_glass_blur(x: Tensor, rng: ImageRng, sigma: float, reach: int, rounds: int) -> Tensor:
    """Grey: each pixel, with probability one half, swaps with such a pixel."""
    moved = gaussian_blur(x, sigma).to(torch.uint8).flatten(1)
    height, width = x.shape[-2:]
    for k in range(rounds):
        bits = rng.bits(k, height * width)
        target = _targets(bits, reach, height, width)
        fair = (bits >> 15) & 1 == 1  # a bit that _targets does not use
        target = torch.where(fair, target, torch.arange(height * width, device=x.device))
        for front in _fronts(reach, height, width, x.device):
            partner = target.index_select(1, front)
            here = moved.index_select(1, front)
            moved.index_copy_(1, front, moved.gather(1, partner))
            moved.scatter_(1, partner, here)
    return gaussian_blur(moved.view_as(x), sigma)


def _taken_from(rng: ImageRng, reach: int, stream: int, shape: torch.Size) -> Tensor:
    """Return the pixel (images, pixels) that each pixel's value comes from after one walk.

    A pixel that points to a later one takes the value that the later one has taken already, so chains only go
    forward. Six doublings follow chains of 64 links. A link has a probability below 0.45, a longer chain below 1e-22.
    """
    height, width = shape
    target = _targets(rng.bits(stream, height * width), reach, height, width)
    if reach == 1:  # targets lie up or left only: no chains
        return target
    own = torch.arange(height * width, device=target.device)
    walked = _walked(reach, height, width, target.device)
    follow = torch.where((target > own) & walked[target], target, own)
    for _ in range(_DOUBLINGS):
        follow = follow.gather(1, follow)
    return target.gather(1, follow)


def _targets(bits: Tensor, reach: int, height: int, width: int) -> Tensor:
    """Return the partner of each pixel, (images, pixels) int64; pixels outside the walk are their own."""
    span = 2 * reach
    down = (((bits >> 16) & 0x7FFF) * span >> 15) - reach
    right = ((bits & 0x7FFF) * span >> 15) - reach
    own = torch.arange(height * width, device=bits.device)
    walked = _walked(reach, height, width, bits.device)
    return own + (down * width + right).mul_(walked)


def _walked(reach: int, height: int, width: int, device: torch.device) -> Tensor:
    """Mask (pixels,) of the pixels that the originals walk over: from `reach` before the end down to `reach` + 1."""
    row = torch.arange(height, device=device)
    col = torch.arange(width, device=device)
    inside = ((row > reach) & (row <= height - reach))[:, None] & (col > reach) & (col <= width - reach)
    return inside.view(-1)


@lru_cache(maxsize=16)
def _fronts(reach: int, height: int, width: int, device: torch.device) -> list[Tensor]:
    """Split the walk into sets of pixels whose swaps touch no common pixel.

    A swap at (h, w) touches rows h - reach .. h + reach - 1 and as many columns. Pixels with the same number
    2 reach h + w are a row and 2 reach columns apart, so their swaps are disjoint. Of two swaps that overlap, the
    earlier one in the walk has the larger number.
    """
    number = torch.arange(height).unsqueeze(1) * (2 * reach) + torch.arange(width)
    inside = _walked(reach, height, width, torch.device("cpu"))
    number = torch.where(inside, number.view(-1), -1)
    own = torch.arange(height * width)
    return [own[number == n].to(device) for n in sorted(set(number[inside].tolist()), reverse=True)]
