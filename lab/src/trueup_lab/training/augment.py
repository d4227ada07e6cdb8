"""Batches of small images: which ones, and how each is shifted and mirrored.

Chance enters in one place, `draw_epoch`, a pure function of (seed, epoch); the rest is arithmetic on the
device. So a run resumed at any epoch sees what it would have seen, on any device.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor


class Draws(NamedTuple):
    """What chance decides for one epoch: an order of images; for each place in it a shift and a mirroring."""

    order: Tensor  # (n,) int64
    shift: Tensor  # (n, 2) int64, rows and columns, 0 to twice the padding
    mirror: Tensor  # (n,) bool


def draw_epoch(seed: int, epoch: int, count: int, *, used: int, padding: int, mirror: bool) -> Draws:
    """Draw for `epoch` of the run with `seed`: `used` of `count` images, without repetition.

    >>> torch.equal(draw_epoch(0, 3, 9, used=8, padding=4, mirror=True).order,
    ...             draw_epoch(0, 3, 9, used=8, padding=4, mirror=True).order)
    True
    """
    generator = torch.Generator().manual_seed(random.Random(f"{seed}/{epoch}").getrandbits(63))
    order = torch.randperm(count, generator=generator)[:used]
    shift = torch.randint(0, 2 * padding + 1, (used, 2), generator=generator)
    mirrored = torch.rand(used, generator=generator) < (0.5 if mirror else 0.0)
    return Draws(order, shift, mirrored)


def crop_and_mirror(images: Tensor, shift: Tensor, mirror: Tensor, padding: int) -> Tensor:
    """Each image padded with `padding` black pixels, cut to its size at `shift`, mirrored where `mirror`.

    `images` (B, C, H, W), `shift` (B, 2), `mirror` (B,). One gather, no copy of the padded images.
    """
    height, width = images.shape[2:]
    rows = shift[:, :1] + torch.arange(height, device=images.device) - padding
    across = torch.arange(width, device=images.device)
    columns = shift[:, 1:] + torch.where(mirror[:, None], width - 1 - across, across) - padding
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    source = source.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, source).view_as(images) * inside[:, None]
