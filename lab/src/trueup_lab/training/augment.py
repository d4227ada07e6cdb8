"""Augmentation of small images: shifting, mirroring, mixing two images, and blanking a box.

All randomness is in `draw_epoch` and `draw_mixing`, pure functions of (seed, epoch). The rest is arithmetic on the
device. So a resumed run sees the same images as an uninterrupted one, on any device.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor


class Draws(NamedTuple):
    """Random draws for one epoch: the order of images and, for each place in it, a shift and a mirroring."""

    order: Tensor  # (n,) int64
    shift: Tensor  # (n, 2) int64, rows and columns, 0 to twice the padding
    mirror: Tensor  # (n,) bool


class Mixing(NamedTuple):
    """Random draws for one epoch about mixing and blanking, for each place in the epoch's order.

    A box is (top, left, bottom, right) in pixels, bottom and right not included; it may be empty.
    """

    weight: Tensor  # (n,) float32: weight of the image itself outside `box`; inside, it is 0
    box: Tensor  # (n, 4) int64
    blank: Tensor  # (n, 4) int64: box in which the image becomes 0


def draw_epoch(seed: int, epoch: int, count: int, *, used: int, padding: int, mirror: bool) -> Draws:
    """Draw for `epoch` of the run with `seed`: `used` of `count` images, without repetition.

    >>> torch.equal(draw_epoch(0, 3, 9, used=8, padding=4, mirror=True).order,
    ...             draw_epoch(0, 3, 9, used=8, padding=4, mirror=True).order)
    True
    """
    generator = _generator(f"{seed}/{epoch}")
    order = torch.randperm(count, generator=generator)[:used]
    shift = torch.randint(0, 2 * padding + 1, (used, 2), generator=generator)
    mirrored = torch.rand(used, generator=generator) < (0.5 if mirror else 0.0)
    return Draws(order, shift, mirrored)


def draw_mixing(seed: int, epoch: int, *, used: int, size: tuple[int, int], mixing: float, erasing: float) -> Mixing:
    """Draw for `epoch` of the run with `seed`: `used` places of images of `size` (height, width).

    The share `mixing` of the images is mixed: half by blending (mixup, Zhang et al., 2018), half by a box (CutMix, Yun
    et al., 2019), with the image's own share uniform between 0 and 1. The share `erasing` gets a blank box of up to a
    quarter of the area (Zhong et al., 2020).
    """
    generator = _generator(f"{seed}/{epoch}/mixing")
    draws = torch.rand(8, used, generator=generator)
    kind, own, erased, area = draws[:4]
    blended, boxed = kind < mixing / 2, (kind >= mixing / 2) & (kind < mixing)
    weight = torch.where(blended, own, 1.0)
    box = _boxes(torch.where(boxed, 1 - own, 0.0), draws[4:6], size)
    blank = _boxes(torch.where(erased < erasing, area / 4, 0.0), draws[6:], size)
    return Mixing(weight, box, blank)


def mix_and_blank(images: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor]:
    """Mix each image (B, C, H, W) with the one before it in the batch, and blank its box.

    Also returns the image's own share (B,): the weight of its label; the other label has the rest. Images must be
    normalised, so that 0 is the mean of all pixels.
    """
    weight, box, blank = mixing
    own = weight[:, None, None] * ~_inside(box, images)
    keep = own[:, None].to(images.dtype)
    mixed = images * keep + images.roll(1, dims=0) * (1 - keep)
    return mixed * ~_inside(blank, images)[:, None], own.mean(dim=(1, 2))


def crop_and_mirror(images: Tensor, shift: Tensor, mirror: Tensor, padding: int) -> Tensor:
    """Pad each image with `padding` black pixels, crop it to its size at `shift`, and mirror it where `mirror`.

    `images` is (B, C, H, W), `shift` (B, 2), `mirror` (B,). One gather, without a copy of the padded images.
    """
    height, width = images.shape[2:]
    rows = shift[:, :1] + torch.arange(height, device=images.device) - padding
    across = torch.arange(width, device=images.device)
    columns = shift[:, 1:] + torch.where(mirror[:, None], width - 1 - across, across) - padding
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    source = source.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, source).view_as(images) * inside[:, None]


def _inside(box: Tensor, images: Tensor) -> Tensor:
    """Mask of the pixels inside each image's box (B, H, W)."""
    rows, columns = (torch.arange(n, device=images.device) for n in images.shape[2:])
    top, left, bottom, right = box.unbind(1)
    in_rows = (rows >= top[:, None]) & (rows < bottom[:, None])
    in_columns = (columns >= left[:, None]) & (columns < right[:, None])
    return in_rows[:, :, None] & in_columns[:, None, :]


def _boxes(area: Tensor, centre: Tensor, size: tuple[int, int]) -> Tensor:
    """Boxes (n, 4) with the share `area` (n,) of the image around `centre` (2, n), cut off at the image's edges."""
    extent = torch.tensor(size)[:, None]
    half = area.sqrt() * extent / 2
    middle = centre * extent
    first = (middle - half).round().clamp(min=0)
    last = torch.minimum((middle + half).round(), extent)
    return torch.cat((first, last)).T.long().contiguous()


def _generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(random.Random(text).getrandbits(63))
