"""ImageNet-C: the published folders, or made image by image from a clean one.

Published: `ImageNet-C/<group>/<corruption>/<severity>/<synset>/*.JPEG`, 224 x 224; the folder of the group
(`noise`, `blur`, `weather`, `digital`, `extra`) may be left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trueup_lab.data.corrupted.arrays import Origin, folder
from trueup_lab.data.corrupted.manifest import Manifest
from trueup_lab.data.corruptions import check, corrupt
from trueup_lab.data.imagenet import Crop, ImageFolder
from trueup_lab.data.images import Images
from trueup_lab.data.root import MissingDataError, data_root

GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
CLEAN = ("imagenet/val", "ImageNet/val", "val", "imagenet_val_1k/val")  # where clean images are looked for


class ImageNetC(Dataset[tuple[Tensor, int]]):
    """ImageNet's validation images under one corruption; item i: (uint8 (3, 224, 224), label).

    From a clean folder (`seed` given), an image is cropped (short side to 256, the middle 224) and corrupted
    when it is asked for; `batches` does so for many at a time, on any device.
    """

    def __init__(
        self,
        source: ImageFolder,
        name: str,
        severity: int,
        origin: Origin,
        seed: int | None = None,
        root: str | os.PathLike[str] | None = None,
    ) -> None:
        check("imagenet-c", name, severity)
        self.source, self.name, self.severity = source, name, severity
        self.origin, self.seed, self.root = origin, seed, root

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels, label = self.source[index]
        return self.corrupted(pixels[None], [index])[0], label

    def batches(self, size: int, device: torch.device | str = "cpu") -> Iterator[Images]:
        """All images in order, `size` at a time, on `device`."""
        first = 0
        for clean in self.source.batches(size):
            numbers = list(range(first, first + len(clean)))
            yield Images(self.corrupted(clean.images.to(device), numbers), clean.labels.to(device))
            first += len(clean)

    def corrupted(self, images: Tensor, numbers: list[int]) -> Tensor:
        """The images `numbers` of the set as they are to be seen, given as they were read."""
        if self.seed is None:
            return images
        return corrupt(
            images,
            self.name,
            self.severity,
            family="imagenet-c",
            indices=numbers,
            seed=self.seed,
            root=self.root,
        )


def imagenet_c(
    name: str,
    severity: int,
    *,
    root: str | os.PathLike[str] | None = None,
    clean: str | os.PathLike[str] | None = None,
    origin: Origin | None = None,
    seed: int = 0,
) -> ImageNetC:
    """One corruption of ImageNet-C: from its folder where that is there, else from the clean images.

    `clean` is a folder `<synset>/*.JPEG`; if not given, it is looked for under the data root. `origin` asks
    for `published` or `generated` images and nothing else.
    """
    check("imagenet-c", name, severity)
    top = folder("imagenet-c", root)
    unit = Path(GROUP_OF[name], name, str(severity))
    for inner in (unit, unit.relative_to(GROUP_OF[name])):
        if (top / inner).is_dir():
            # A folder that is being made is not listed yet, and not read.
            found: Origin = "generated" if str(inner) in Manifest.read(top).files else "published"
            if origin in (None, found) and not (top / inner / UNFINISHED).exists():
                return ImageNetC(ImageFolder(top / inner, Crop(224, 224)), name, severity, found)
    if origin == "published":
        raise MissingDataError(
            f"no published {name} of severity {severity} at {top / unit}; "
            "get it with `trueup data get imagenet-c`, or take origin='generated'"
        )
    source = ImageFolder(clean if clean is not None else clean_folder(root), Crop(224, 256))
    return ImageNetC(source, name, severity, "generated", seed, root)


UNFINISHED = ".unfinished"
"""The file that marks a folder of images that is being made."""


def clean_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of ImageNet's clean validation images under the data root."""
    for place in CLEAN:
        if (data_root(root) / place).is_dir():
            return data_root(root) / place
    raise MissingDataError(
        f"no clean ImageNet images under {data_root(root)} (looked for {', '.join(CLEAN)}); put the "
        "validation images there as <synset>/*.JPEG, or name their folder"
    )
