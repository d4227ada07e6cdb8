"""Random numbers that belong to an image: the same in any batch, order, process, thread count and device.

A draw is a hash of (seed, corruption, severity, image index, draw number, position), so nothing has a state.
The hash is SplitMix64's finaliser (Steele, Lea and Flood, 2014) over a Weyl sequence that starts at the
image's key. Everything up to and including `normal` is integer arithmetic or a table of rounded values, so
that CPU and GPU agree bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from trueup_lab.data.corruptions.arithmetic import ONE

_WEYL = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_DRAW = 1 << 40  # words a draw may take before it would run into the next one


class Draws:
    """Random numbers for the images `indices` of one corruption at one severity.

    `draw` numbers the uses within a corruption: two uses with different numbers are independent. Each method
    gives one row an image.

    >>> few = Draws(0, "fog", 3, [7], "cpu").bits(0, 4)
    >>> many = Draws(0, "fog", 3, [5, 6, 7], "cpu").bits(0, 4)
    >>> bool((few[0] == many[2]).all())
    True
    """

    def __init__(
        self,
        seed: int,
        name: str,
        severity: int,
        indices: Sequence[int] | Tensor,
        device: torch.device | str,
    ):
        digest = hashlib.blake2b(f"{seed}/{name}/{severity}".encode(), digest_size=8).digest()
        start = _signed(int.from_bytes(digest, "little"))
        index = torch.as_tensor(indices, dtype=torch.int64).cpu()
        self._host = _mix(_mix(index * _signed(_WEYL)) + start).unsqueeze(1)
        self._keys = self._host.to(device, non_blocking=True)
        self.device = torch.device(device)

    def __len__(self) -> int:
        return len(self._host)

    def bits(self, draw: int, count: int) -> Tensor:
        """(images, count) int32, every bit fair."""
        return _words(self._keys, draw, (count + 1) // 2).view(torch.int32)[:, :count]

    def uniform(self, draw: int, count: int) -> Tensor:
        """(images, count) float32 in (0, 1): odd multiples of 2**-17, with mean one half."""
        halves = _words(self._keys, draw, (count + 3) // 4).view(torch.int16)[:, :count]
        return (halves.float() + (0.5 + 2**15)) * 2.0**-16

    def normal(self, draw: int, count: int) -> Tensor:
        """(images, count) float32, standard normal, in steps of 2**-16.

        The sum of two entries of a table of 65,536 normal quantiles (scaled by the root of a half): five
        spreads out it still has the right density, and no function is evaluated that rounds differently
        from one device, or one vector width, to the next.
        """
        halves = _words(self._keys, draw, (count + 1) // 2).view(torch.int16)[:, : 2 * count]
        value = _quantiles(self.device).index_select(0, halves.reshape(-1).int() + 2**15)
        return value.view(len(self), 2, count).sum(1)

    def choice(self, draw: int, options: int | Sequence[int]) -> Tensor:
        """(images,) int64 on the CPU: one of 0..options-1 for each image (or below its own bound)."""
        unit = (_words(self._host, draw, 1)[:, 0] >> 32) & 0xFFFFFFFF
        return (unit * torch.as_tensor(options, dtype=torch.int64)) >> 32

    def fraction(self, draw: int, count: int = 1) -> Tensor:
        """(images, count) float64 on the CPU, in (0, 1): the few numbers that steer an image's treatment."""
        word = (_words(self._host, draw, count) >> 12) & ((1 << 52) - 1)
        return (word.double() + 0.5) * 2.0**-52


def _words(keys: Tensor, draw: int, count: int) -> Tensor:
    offsets = torch.arange(count, device=keys.device).mul_(_signed(_WEYL)).add_(_signed(draw * _DRAW * _WEYL))
    return _mix(keys + offsets)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser. torch shifts int64 with its sign, hence the masks."""
    z = z ^ ((z >> 30) & ((1 << 34) - 1))
    z = z.mul_(_signed(_MIX1))
    z ^= (z >> 27) & ((1 << 37) - 1)
    z = z.mul_(_signed(_MIX2))
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


@lru_cache
def _quantiles(device: torch.device) -> Tensor:
    middle = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    value: Tensor = torch.special.ndtri(middle)
    value = value * (math.sqrt(0.5) / value.std(correction=0))
    return (value * ONE).round().div(ONE).float().to(device)
