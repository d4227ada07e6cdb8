"""The data sets that fit into memory, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trueup_lab.data import camvid, cifar10, digits, mnist, scenes
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
    dense: tuple[str, ...] = ()  # names of the classes, if every pixel has one; labels beyond them are ignored

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
    "scenes": ImageSet("scenes", scenes.load, image_channels=3, classes=len(scenes.CLASSES), dense=scenes.CLASSES),
    "camvid": ImageSet("camvid", camvid.load, image_channels=3, classes=len(camvid.CLASSES), dense=camvid.CLASSES),
}
