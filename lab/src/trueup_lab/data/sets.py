"""The data sets that fit into memory, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trueup_lab.data import cifar10, digits, mnist
from trueup_lab.data.images import NORMALISATION, Images, Normalisation
from trueup_lab.data.root import DataRoot

Loader = Callable[..., Images]


@dataclass(frozen=True)
class ImageSet:
    """A data set that fits into memory: how to read and normalise it."""

    name: str
    read: Loader
    image_channels: int
    classes: int = 10

    @property
    def normalisation(self) -> Normalisation:
        """Normalisation of its pixels."""
        return NORMALISATION[self.name]

    def load(self, split: str, root: DataRoot = None) -> Images:
        """Load its `train` or `test` images from the data root."""
        return self.read(split, root)


SETS = {
    "mnist": ImageSet("mnist", mnist.load, image_channels=1),
    "cifar10": ImageSet("cifar10", cifar10.load, image_channels=3),
    "digits": ImageSet("digits", digits.load, image_channels=1),
}
