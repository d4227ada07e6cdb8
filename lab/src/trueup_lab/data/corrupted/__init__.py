"""Corrupted test sets: read as published where they are there, else made from the clean set."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from trueup_lab.data import cifar10, mnist
from trueup_lab.data.corrupted import arrays
from trueup_lab.data.corrupted.arrays import Origin
from trueup_lab.data.corrupted.folders import ImageNetC, imagenet_c
from trueup_lab.data.corruptions import check, corrupt
from trueup_lab.data.images import Images

__all__ = ["Corrupted", "ImageNetC", "Origin", "clean", "imagenet_c", "load"]


class Corrupted(NamedTuple):
    """A corrupted test set, or a part of it, and where it comes from."""

    images: Tensor  # (N, C, H, W) uint8; a view of the file, read when it is looked at
    labels: Tensor  # (N,) int64
    origin: Origin

    def __len__(self) -> int:
        """The number of images (not of fields)."""
        return self.images.shape[0]

    @property
    def data(self) -> Images:
        """The images and labels alone."""
        return Images(self.images, self.labels)


def load(
    family: str,
    name: str,
    severity: int | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    origin: Origin | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Corrupted:
    """The 10,000 test images of `family` under the corruption `name`, on the CPU.

    Arrays under the data root are memory-mapped; whether they are `published` or `generated` their manifest
    says (see `trueup data make`). Where there are none, the clean set is corrupted here and now, on `device`,
    with `seed`. `origin` asks for one of the two and nothing else. (ImageNet-C: `imagenet_c`.)
    """
    if family == "imagenet-c":
        raise ValueError("imagenet-c is too large to load at once; iterate over imagenet_c(name, severity)")
    chosen = check(family, name, severity)
    found = arrays.read(family, name, chosen, root)
    if found is not None and origin in (None, found[1]):
        return Corrupted(*found[0], found[1])
    if origin == "published":
        raise arrays.missing(family, name, chosen, root)
    source = clean(family, root)
    made = corrupt(source.images.to(device), name, severity, family=family, seed=seed, root=root)
    return Corrupted(made.cpu(), source.labels, "generated")


def clean(family: str, root: str | os.PathLike[str] | None = None) -> Images:
    """The test set that `family` is made of."""
    readers = {"mnist-c": mnist.load, "cifar10-c": cifar10.load}
    if family not in readers:
        raise ValueError(f"{family!r} is made of no set that fits into memory; {', '.join(readers)} are")
    return readers[family]("test", root)
