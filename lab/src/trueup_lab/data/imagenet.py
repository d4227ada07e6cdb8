"""ImageNet from a folder `<split>/<synset>/*.JPEG`. Images are read on access."""

from __future__ import annotations

import io
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from trueup_lab.data.images import Images
from trueup_lab.data.marks import check_jpeg
from trueup_lab.data.root import MissingDataError

SUFFIXES = (".jpeg", ".jpg", ".png")


@dataclass(frozen=True)
class Crop:
    """Rule that turns an image of any size into a square of `size` pixels.

    For testing, the short side is resized to `resize` and the middle cut out. For training (`random`), a piece with 8
    to 100 % of the area and an aspect ratio between 3/4 and 4/3 is resized, and mirrored half of the time.
    """

    size: int = 224
    resize: int = 256
    random: bool = False


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images of `folder/<synset>/*`, class k being the k-th synset in alphabetical order.

    Item i is `(pixels, label)`, pixels uint8 (3, size, size). A random crop is a function of (`seed`, epoch, i):
    `set_epoch` changes the crops, and a resumed run repeats them.
    """

    def __init__(self, folder: str | os.PathLike[str], crop: Crop = Crop(), seed: int = 0) -> None:  # noqa: B008
        self.folder = Path(folder)
        self.crop = crop
        self.seed = seed
        self._epoch = 0
        if not self.folder.is_dir():
            raise MissingDataError(
                f"no folder {self.folder}: expected one folder per class, {self.folder}/<synset>/*.JPEG; "
                "request ImageNet (ILSVRC 2012) at https://image-net.org/download"
            )
        self.synsets = tuple(sorted(entry.name for entry in self.folder.iterdir() if entry.is_dir()))
        self.files: list[tuple[Path, int]] = [
            (file, label)
            for label, synset in enumerate(self.synsets)
            for file in sorted((self.folder / synset).iterdir())
            if file.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise MissingDataError(f"no images in {self.folder}: expected {self.folder}/<synset>/*.JPEG")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        chance = random.Random(f"{self.seed}/{self._epoch}/{index}") if self.crop.random else None
        return read_image(path, self.crop, chance), label

    def set_epoch(self, epoch: int) -> None:
        """Select the random crops of `epoch`."""
        self._epoch = epoch

    def batches(self, size: int) -> Iterator[Images]:
        """Yield all images in order, `size` at a time."""
        for start in range(0, len(self), size):
            items = [self[i] for i in range(start, min(start + size, len(self)))]
            yield Images(torch.stack([x for x, _ in items]), torch.tensor([label for _, label in items]))


def read_image(path: Path, crop: Crop, chance: random.Random | None = None) -> Tensor:
    """Read `path` as uint8 (3, size, size), cropped at random by `chance`, or in the middle if that is None."""
    content = path.read_bytes()
    check_jpeg(path, content)
    try:
        with Image.open(io.BytesIO(content)) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise ValueError(f"{path} is not an image, or is damaged ({error}); delete it or get it again") from error
    square = _middle(image, crop) if chance is None else _random_piece(image, crop, chance)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def _middle(image: Image.Image, crop: Crop) -> Image.Image:
    short = min(image.size)
    if short != crop.resize:
        width, height = (max(crop.resize, round(side * crop.resize / short)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (image.width - crop.size) // 2, (image.height - crop.size) // 2
    return image.crop((left, top, left + crop.size, top + crop.size))


def _random_piece(image: Image.Image, crop: Crop, chance: random.Random) -> Image.Image:
    left, top, width, height = _random_box(image.width, image.height, chance)
    piece = image.resize((crop.size, crop.size), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    return piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if chance.random() < 0.5 else piece


def _random_box(width: int, height: int, chance: random.Random) -> tuple[int, int, int, int]:
    """Draw a box (left, top, width, height) as `Crop` describes; if none fits, take the middle."""
    for _ in range(10):
        area = width * height * chance.uniform(0.08, 1.0)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return chance.randint(0, width - w), chance.randint(0, height - h), w, h
    side = min(width, height)
    w, h = min(width, round(side * 4 / 3)), min(height, round(side * 4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h
