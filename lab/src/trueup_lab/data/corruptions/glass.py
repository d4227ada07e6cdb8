"""Glass blur: pixels trade places with near ones, between two gaussian blurs.

The originals walk over the pixels from the last to the first, one after another. In colour, their swap of
two NumPy views copies instead: each pixel takes the present value of a near one. In grey it swaps. Both are
done here exactly as in sequence, without a step for each pixel.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from trueup_lab.data.corruptions.blur import gaussian_blur
from trueup_lab.data.corruptions.draws import Draws

_DOUBLINGS = 6


def copying_glass_blur(x: Tensor, draws: Draws, sigma: float, reach: int, rounds: int) -> Tensor:
    """Colour: each pixel takes the value of one at most `reach` up or left and `reach` - 1 down or right."""
    blurred = gaussian_blur(x, sigma).to(torch.uint8)
    source = _taken_from(draws, reach, 0, x.shape[-2:])
    for k in range(1, rounds):
        source = source.gather(1, _taken_from(draws, reach, k, x.shape[-2:]))
    moved = blurred.flatten(2).gather(2, source.unsqueeze(1).expand(-1, x.shape[1], -1))
    return gaussian_blur(moved.view_as(x), sigma)


def swapping_glass_blur(x: Tensor, draws: Draws, sigma: float, reach: int, rounds: int) -> Tensor:
    """Grey: each pixel, with probability one half, swaps with such a pixel."""
    moved = gaussian_blur(x, sigma).to(torch.uint8).flatten(1)
    height, width = x.shape[-2:]
    for k in range(rounds):
        bits = draws.bits(k, height * width)
        target = _targets(bits, reach, height, width)
        fair = (bits >> 15) & 1 == 1  # a bit that _targets leaves over
        target = torch.where(fair, target, torch.arange(height * width, device=x.device))
        for front in _fronts(reach, height, width, x.device):
            partner = target.index_select(1, front)
            here = moved.index_select(1, front)
            moved.index_copy_(1, front, moved.gather(1, partner))
            moved.scatter_(1, partner, here)
    return gaussian_blur(moved.view_as(x), sigma)


def _taken_from(draws: Draws, reach: int, draw: int, shape: torch.Size) -> Tensor:
    """(images, pixels): where each pixel's value came from at the end of one walk.

    A pixel that points to a later one takes what that one has by then taken itself: a chain that only goes
    forward. Six doublings follow chains of 64 links; a link has a probability below 0.45, so that a longer
    chain has one below 1e-22.
    """
    height, width = shape
    target = _targets(draws.bits(draw, height * width), reach, height, width)
    if reach == 1:  # points up or left only: no chains
        return target
    own = torch.arange(height * width, device=target.device)
    walked = _walked(reach, height, width, target.device)
    follow = torch.where((target > own) & walked[target], target, own)
    for _ in range(_DOUBLINGS):
        follow = follow.gather(1, follow)
    return target.gather(1, follow)


def _targets(bits: Tensor, reach: int, height: int, width: int) -> Tensor:
    """(images, pixels) int64: the pixel each one is paired with; itself where the walk does not go."""
    span = 2 * reach
    down = (((bits >> 16) & 0x7FFF) * span >> 15) - reach
    right = ((bits & 0x7FFF) * span >> 15) - reach
    own = torch.arange(height * width, device=bits.device)
    walked = _walked(reach, height, width, bits.device)
    return own + (down * width + right).mul_(walked)


def _walked(reach: int, height: int, width: int, device: torch.device) -> Tensor:
    """(pixels,) bool: the originals start `reach` before the end and stop after `reach` + 1."""
    row = torch.arange(height, device=device)
    col = torch.arange(width, device=device)
    inside = ((row > reach) & (row <= height - reach))[:, None] & (col > reach) & (col <= width - reach)
    return inside.view(-1)


@lru_cache(maxsize=16)
def _fronts(reach: int, height: int, width: int, device: torch.device) -> list[Tensor]:
    """The walk as a list of sets of pixels whose swaps cannot meet.

    A swap at (h, w) touches rows h - reach .. h + reach - 1 and as many columns. Pixels with the same
    2 reach h + w are a row and 2 reach columns apart, so they touch nothing in common; and of two swaps
    that do, the one that comes first in the walk has the larger number.
    """
    number = torch.arange(height).unsqueeze(1) * (2 * reach) + torch.arange(width)
    inside = _walked(reach, height, width, torch.device("cpu"))
    number = torch.where(inside, number.view(-1), -1)
    own = torch.arange(height * width)
    return [own[number == n].to(device) for n in sorted(set(number[inside].tolist()), reverse=True)]
