"""The small sets by name: everything that training or evaluating on one needs to know."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from trueup_lab.data import cifar10, digits, mnist
from trueup_lab.data.images import NORMALISATION, Images, Normalisation

Loader = Callable[..., Images]


@dataclass(frozen=True)
class ImageSet:
    """A set that fits into memory: how to read it and how its pixels become input."""

    name: str
    read: Loader
    channels: int
    classes: int = 10

    @property
    def normalisation(self) -> Normalisation:
        """How its pixels become input."""
        return NORMALISATION[self.name]

    def load(self, split: str, root: str | os.PathLike[str] | None = None) -> Images:
        """Its `train` or `test` images, from the data root."""
        return self.read(split, root)


SETS = {
    "mnist": ImageSet("mnist", mnist.load, channels=1),
    "cifar10": ImageSet("cifar10", cifar10.load, channels=3),
    "digits": ImageSet("digits", digits.load, channels=1),
}
