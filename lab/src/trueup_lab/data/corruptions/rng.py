"""Random numbers per image, the same in every batch, order, process, thread count and device.

A random number is a hash of (seed, corruption, severity, image index, stream, position), so there is no state. The
hash is SplitMix64's finaliser (Steele, Lea and Flood, 2014) over a Weyl sequence that starts at the image's key. All of
it is integer arithmetic or a table of rounded values, so that CPU and GPU agree bit for bit.
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
_STREAM = 1 << 40  # words per stream


class ImageRng:
    """Random numbers for the images `indices` of one corruption at one severity.

    Each method returns one row per image. `stream` numbers the uses within a corruption: different streams are
    independent.

    >>> few = ImageRng(0, "fog", 3, [7], "cpu").bits(0, 4)
    >>> many = ImageRng(0, "fog", 3, [5, 6, 7], "cpu").bits(0, 4)
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

    def bits(self, stream: int, count: int) -> Tensor:
        """Return (images, count) int32 of fair bits."""
        return _words(self._keys, stream, (count + 1) // 2).view(torch.int32)[:, :count]

    def uniform(self, stream: int, count: int) -> Tensor:
        """Return (images, count) float32 in (0, 1): odd multiples of 2**-17, with mean one half."""
        halves = _words(self._keys, stream, (count + 3) // 4).view(torch.int16)[:, :count]
        return (halves.float() + (0.5 + 2**15)) * 2.0**-16

    def normal(self, stream: int, count: int) -> Tensor:
        """Return (images, count) float32, standard normal, multiples of 2**-16.

        Each is the sum of two entries of a table of 65,536 normal quantiles, scaled by the root of one half. The
        density is right up to five standard deviations, and no function is evaluated whose rounding depends on the
        device or the vector width.
        """
        halves = _words(self._keys, stream, (count + 1) // 2).view(torch.int16)[:, : 2 * count]
        value = _quantiles(self.device).index_select(0, halves.reshape(-1).int() + 2**15)
        return value.view(len(self), 2, count).sum(1)

    def choice(self, stream: int, options: int | Sequence[int]) -> Tensor:
        """Return (images,) int64 on the CPU in 0..options-1; `options` may hold one bound per image."""
        unit = (_words(self._host, stream, 1)[:, 0] >> 32) & 0xFFFFFFFF
        return (unit * torch.as_tensor(options, dtype=torch.int64)) >> 32

    def fraction(self, stream: int, count: int = 1) -> Tensor:
        """Return (images, count) float64 on the CPU in (0, 1), for angles and positions."""
        word = (_words(self._host, stream, count) >> 12) & ((1 << 52) - 1)
        return (word.double() + 0.5) * 2.0**-52


def _words(keys: Tensor, stream: int, count: int) -> Tensor:
    offsets = torch.arange(count, device=keys.device).mul_(_signed(_WEYL)).add_(_signed(stream * _STREAM * _WEYL))
    return _mix(keys + offsets)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser. The masks clear the sign bits that torch shifts into int64."""
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
