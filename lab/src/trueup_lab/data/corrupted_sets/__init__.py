"""Corrupted test sets: read from the data root, or else generated from the clean set."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trueup_lab.data import cifar10, mnist
from trueup_lab.data.corrupted_sets import arrays
from trueup_lab.data.corrupted_sets.folders import ImageNetC, imagenet_c
from trueup_lab.data.corrupted_sets.manifest import Origin
from trueup_lab.data.corruptions import check, corrupt
from trueup_lab.data.images import Images
from trueup_lab.data.root import DataRoot

__all__ = ["Corrupted", "ImageNetC", "Origin", "clean", "imagenet_c", "load"]


class Corrupted(NamedTuple):
    """A corrupted test set, or a part of it, and its origin."""

    images: Tensor  # (N, C, H, W) uint8; a view of the file, read on access
    labels: Tensor  # (N,) int64
    origin: Origin

    def __len__(self) -> int:
        """Return the number of images (not of fields)."""
        return self.images.shape[0]


def load(
    family: str,
    name: str,
    severity: int | None = None,
    *,
    root: DataRoot = None,
    origin: Origin | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Corrupted:
    """Load the 10,000 test images of `family` under the corruption `name`, on the CPU.

    Arrays under the data root are memory-mapped: `published` ones, or those that `trueup data make` has `generated`
    from this `seed`. If there are none, the clean set is corrupted on `device`. `origin` restricts the choice to one of
    the two. For ImageNet-C use `imagenet_c`.
    """
    if family == "imagenet-c":
        raise ValueError("family='imagenet-c' does not fit into memory; iterate over imagenet_c(name, severity)")
    chosen = check(family, name, severity)
    found = arrays.read(family, name, chosen, root, seed=seed)
    if found is not None and origin in (None, found[1]):
        return Corrupted(*found[0], found[1])
    if origin == "published":
        raise arrays.missing(family, name, chosen, root)
    source = clean(family, root)
    made = corrupt(source.images.to(device), name, severity, family=family, seed=seed, root=root)
    return Corrupted(made.cpu(), source.labels, "generated")


def clean(family: str, root: DataRoot = None) -> Images:
    """Load the clean test set that `family` is made from."""
    readers = {"mnist-c": mnist.load, "cifar10-c": cifar10.load}
    if family not in readers:
        raise ValueError(f"family={family!r} has no clean set that fits into memory; expected {', '.join(readers)}")
    return readers[family]("test", root)
