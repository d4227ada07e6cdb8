"""Noise that is independent per value: gaussian, shot, impulse, speckle.

Each is a 256 x 256 table whose row v holds the probabilities of the 256 bytes that v may become. Sampling by Walker's
alias method takes one table lookup and one 32-bit random number per value, for every distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from trueup_lab.data.corruptions.rng import ImageRng

GREYS = torch.arange(256, dtype=torch.float64)


def gaussian_noise(x: Tensor, rng: ImageRng, scale: float, cut: float) -> Tensor:
    """Add normal noise of standard deviation `scale` times the white level.

    `cut` is the lowest value that still becomes byte 1: 1 where bytes are truncated, 1/2 where rounded.
    """
    return _sample(x, rng, _gaussian, scale, cut)


def speckle_noise(x: Tensor, rng: ImageRng, scale: float, cut: float) -> Tensor:
    """Add normal noise of standard deviation `scale` times the value itself."""
    return _sample(x, rng, _speckle, scale, cut)


def shot_noise(x: Tensor, rng: ImageRng, photons: float, cut: float) -> Tensor:
    """Apply Poisson noise: white is `photons` photons on average."""
    return _sample(x, rng, _shot, photons, cut)


def impulse_noise(x: Tensor, rng: ImageRng, amount: float, cut: float) -> Tensor:
    """Turn values black or white, each with probability `amount` / 2 (salt and pepper)."""
    return _sample(x, rng, _impulse, amount, cut)


def _gaussian(scale: float, cut: float) -> Tensor:
    return _normal(torch.full((256,), 255 * scale, dtype=torch.float64), cut)


def _speckle(scale: float, cut: float) -> Tensor:
    return _normal(scale * GREYS, cut)


def _normal(deviation: Tensor, cut: float) -> Tensor:
    edges = GREYS[:-1] + cut  # values below edge k become at most byte k
    # the floor keeps a value whose noise is zero unchanged
    below = torch.special.ndtr((edges - GREYS[:, None]) / deviation[:, None].clamp(min=1e-9))
    return torch.diff(below, prepend=torch.zeros(256, 1), append=torch.ones(256, 1))


def _shot(photons: float, cut: float) -> Tensor:
    mean = GREYS[:, None] / 255 * photons
    count = torch.arange(int(photons), dtype=torch.float64)  # counts of `photons` or more are clipped to white
    chance = torch.exp(torch.xlogy(count, mean) - mean - torch.lgamma(count + 1))
    becomes = _whole(count / photons * 255, cut)
    table = torch.zeros(256, 256, dtype=torch.float64).index_add_(1, becomes, chance)
    table[:, 255] += 1 - chance.sum(1)
    return table


def _impulse(amount: float, _: float) -> Tensor:
    table = torch.eye(256, dtype=torch.float64) * (1 - amount)
    table[:, [0, 255]] += amount / 2
    return table


def _whole(value: Tensor, cut: float) -> Tensor:
    # the slack absorbs rounding just below an integer; halves go to even, as in NumPy
    return ((value + 1e-9).floor() if cut == 1 else value.round()).long()


def _sample(x: Tensor, rng: ImageRng, law: Callable[[float, float], Tensor], level: float, cut: float) -> Tensor:
    table = _alias_table(law, level, cut, x.device)
    bits = rng.bits(0, x[0].numel()).view_as(x)
    column = bits & 255
    entry = table.index_select(0, (x.int() * 256).add_(column).view(-1)).view_as(x)
    return torch.where((bits >> 8) < (entry >> 8), column, entry & 255).to(torch.uint8)


@lru_cache(maxsize=64)
def _alias_table(law: Callable[[float, float], Tensor], level: float, cut: float, device: torch.device) -> Tensor:
    """Walker's alias table of each row, packed: 24 bits of threshold (signed, like the random bits), 8 of alias.

    Column j of row v means byte j if the upper 24 random bits are below the threshold, else the alias.
    """
    share = law(level, cut).clamp(min=0).numpy() * 256
    share *= 256 / share.sum(1, keepdims=True)
    rows = np.arange(256)
    threshold = np.full((256, 256), 1.0)
    alias = np.tile(rows, (256, 1))
    left = share.copy()
    done = np.zeros((256, 256), dtype=bool)
    for _ in range(255):  # fill the poorest column from the richest, in all rows at once
        poor = np.where(done, np.inf, left).argmin(1)
        rich = np.where(done, -np.inf, left).argmax(1)
        threshold[rows, poor] = np.minimum(left[rows, poor], 1.0)
        alias[rows, poor] = rich
        left[rows, rich] -= 1.0 - threshold[rows, poor]
        done[rows, poor] = True
    steps = np.round(threshold * 2**24).astype(np.int64) - 2**23
    # a threshold of one would need a 25th bit; there the alias is the column itself, with the same effect
    alias[steps >= 2**23] = np.broadcast_to(rows, (256, 256))[steps >= 2**23]
    packed = (np.minimum(steps, 2**23 - 1) << 8) | alias
    return torch.from_numpy(packed.astype(np.int32).reshape(-1)).to(device)
