"""ImageNet-C: read from folders in the published layout, or generated image by image from clean ones.

The layout is `ImageNet-C/<group>/<corruption>/<severity>/<synset>/*.JPEG`, 224 x 224; the folder of the group
(`noise`, `blur`, `weather`, `digital`, `extra`) may be left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trueup_lab.data.corrupted_sets.arrays import folder
from trueup_lab.data.corrupted_sets.manifest import Manifest, Origin
from trueup_lab.data.corrupted_sets.recipe import recipe_of
from trueup_lab.data.corruptions import check, corrupt
from trueup_lab.data.imagenet import Crop, ImageFolder
from trueup_lab.data.images import Images
from trueup_lab.data.root import DataRoot, MissingDataError, data_root

GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
CLEAN = ("imagenet/val", "ImageNet/val", "val", "imagenet_val_1k/val")  # candidates for the clean images


class ImageNetC(Dataset[tuple[Tensor, int]]):
    """ImageNet's validation images under one corruption. Item i is (uint8 (3, 224, 224), label).

    If `seed` is given, `source` holds clean images: each is cropped (short side to 256, the middle 224) and corrupted
    on access, and `batches` does so for many at a time, on any device.
    """

    def __init__(
        self,
        source: ImageFolder,
        name: str,
        severity: int,
        origin: Origin,
        seed: int | None = None,
        root: DataRoot = None,
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
        """Yield all images in order, `size` at a time, on `device`."""
        first = 0
        for clean in self.source.batches(size):
            numbers = list(range(first, first + len(clean)))
            yield Images(self.corrupted(clean.images.to(device), numbers), clean.labels.to(device))
            first += len(clean)

    def corrupted(self, images: Tensor, numbers: list[int]) -> Tensor:
        """Corrupt the images `numbers` of the set, unless they were read corrupted."""
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
    root: DataRoot = None,
    origin: Origin | None = None,
    seed: int = 0,
) -> ImageNetC:
    """Open one corruption of ImageNet-C: from its folder if that exists, else generated from the clean images.

    A folder that was generated from another seed, by another version of the generator or not completely is not read.
    `origin` restricts the choice to `published` or `generated` images.
    """
    check("imagenet-c", name, severity)
    top = folder("imagenet-c", root)
    unit = f"{GROUP_OF[name]}/{name}/{severity}"
    for inner in (unit, f"{name}/{severity}"):
        found = _found(top, inner, name, severity, seed)
        if found is not None and origin in (None, found):
            return ImageNetC(ImageFolder(top / inner, Crop(224, 224)), name, severity, found)
    if origin == "published":
        raise MissingDataError(
            f"no published {name} of severity {severity} at {top / unit}; "
            "get it with `trueup data get imagenet-c`, or pass origin='generated'"
        )
    source = ImageFolder(clean_folder(root), Crop(224, 256))
    return ImageNetC(source, name, severity, "generated", seed, root)


UNFINISHED = ".unfinished"
"""Name of the file that marks an unfinished folder of generated images."""


def listing(place: Path) -> tuple[str, int]:
    """Return a digest of the names and sizes of a folder's images, and their total size."""
    if not place.is_dir():
        return "", 0
    files = sorted(file for file in place.glob("*/*") if not file.name.startswith("."))
    sizes = [file.stat().st_size for file in files]
    lines = (f"{file.relative_to(place).as_posix()} {size}\n" for file, size in zip(files, sizes, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest(), sum(sizes)


def _found(top: Path, unit: str, name: str, severity: int, seed: int) -> Origin | None:
    """Return the origin of a folder that can be read; None if it is missing, unfinished or of another recipe."""
    place = top / unit
    if (place / UNFINISHED).exists() or not any(place.glob("*/*")):
        return None
    manifest = Manifest.read(top)
    if manifest.origin(unit) == "published":
        return "published"
    if not manifest.usable(unit, recipe_of("imagenet-c", name, seed, severity)):
        return None
    manifest.check_mark(unit)
    made = manifest.files[unit]
    if listing(place) != (made.sha256, made.bytes):
        raise ValueError(f"{place} is damaged: images are missing or changed; run `trueup data make` again")
    return "generated"


def clean_folder(root: DataRoot = None) -> Path:
    """Find the folder of ImageNet's clean validation images under the data root."""
    for place in CLEAN:
        if (data_root(root) / place).is_dir():
            return data_root(root) / place
    raise MissingDataError(
        f"no clean ImageNet images under {data_root(root)} (looked for {', '.join(CLEAN)}); put the "
        "validation images there as <synset>/*.JPEG"
    )
