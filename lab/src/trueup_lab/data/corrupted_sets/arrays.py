"""The arrays of MNIST-C and CIFAR-10-C, memory-mapped from their published layout.

MNIST-C: `MNIST-C/<corruption>/test_images.npy` (10000, 28, 28, 1) and `test_labels.npy`, as in the archive (whose own
folder is called `mnist_c`); `images.npy` and `labels.npy` are accepted too.
CIFAR-10-C: `CIFAR-10-C/<corruption>.npy` (50000, 32, 32, 3), the five severities one after another, and `labels.npy`
(50000,).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trueup_lab.data.corrupted_sets.manifest import Manifest, Origin
from trueup_lab.data.corrupted_sets.recipe import recipe_of
from trueup_lab.data.corruptions.families import FAMILIES
from trueup_lab.data.images import Images
from trueup_lab.data.root import DataRoot, MissingDataError, data_root

FOLDERS = {"mnist-c": ("MNIST-C", "mnist_c"), "cifar10-c": ("CIFAR-10-C",), "imagenet-c": ("ImageNet-C",)}
_NAMES = {"mnist-c": (("test_images.npy", "test_labels.npy"), ("images.npy", "labels.npy"))}
_SEVERITIES = 5
_AGAIN = "Delete it, then get it again with `trueup data get`, or make it with `trueup data make`"


def folder(family: str, root: DataRoot = None) -> Path:
    """Return the folder of `family` under the data root: an existing one, else where it would be made."""
    candidates = [data_root(root) / name for name in FOLDERS[family]]
    return next((path for path in candidates if path.is_dir()), candidates[0])


def read(
    family: str, name: str, severity: int, root: DataRoot = None, *, seed: int = 0
) -> tuple[Images, Origin] | None:
    """Read the images and labels of one corruption (`severity` 0 if it has none).

    None if there are no files, or if they were generated in another way: from another seed, by another version of the
    generator, or not completely yet.
    """
    top = folder(family, root)
    files = _files(family, top, name, severity)
    if files is None:
        return None
    listed = files[0].relative_to(top).as_posix()
    manifest = Manifest.read(top)
    origin = manifest.origin(listed)
    if origin == "generated":
        if not manifest.usable(listed, recipe_of(family, name, seed)):
            return None
        manifest.check(listed)
    images, labels = _mapped(files[0]), _mapped(files[1])
    size, channels = FAMILIES[family].size, FAMILIES[family].channels
    if images.ndim == 3 and channels == 1:
        images = images[..., None]
    if images.dtype != np.uint8 or images.shape[1:] != (size, size, channels):
        raise ValueError(
            f"{files[0]} holds {images.dtype} {images.shape}; expected uint8 (N, {size}, {size}, {channels}). {_AGAIN}"
        )
    if labels.shape != (len(images),):
        raise ValueError(f"{files[1]} holds {labels.shape} labels for the {len(images)} images of {files[0]}. {_AGAIN}")
    if family == "cifar10-c":
        images, labels = _of_severity(files, images, labels, severity)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    return Images(pixels, torch.from_numpy(labels.astype(np.int64))), origin


def missing(family: str, name: str, severity: int, root: DataRoot) -> MissingDataError:
    """Return the error for a published set that is missing."""
    if severity != FAMILIES[family].published.get(name, severity):
        only = FAMILIES[family].published[name]
        return MissingDataError(
            f"{name} of {family} is published at severity {only} only, not at {severity}; "
            "pass severity=None, or origin='generated'"
        )
    return MissingDataError(
        f"no published {name} of {family} in {folder(family, root)}; get it with `trueup data get {family}`, "
        "or pass origin='generated'"
    )


def _files(family: str, top: Path, name: str, severity: int) -> tuple[Path, Path] | None:
    if family == "cifar10-c":
        files = top / f"{name}.npy", top / "labels.npy"
        return files if all(file.exists() for file in files) else None
    if severity != FAMILIES[family].published.get(name, 0):
        return None
    for images, labels in _NAMES[family]:
        files = top / name / images, top / name / labels
        if all(file.exists() for file in files):
            return files
    return None


def _mapped(path: Path) -> np.ndarray:
    """Memory-map an array, copy on write because torch wants writable arrays."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}). {_AGAIN}") from error
    return array


def _of_severity(
    files: tuple[Path, Path], images: np.ndarray, labels: np.ndarray, severity: int
) -> tuple[np.ndarray, np.ndarray]:
    count, rest = divmod(len(images), _SEVERITIES)
    each = np.asarray(labels[: count * _SEVERITIES]).reshape(_SEVERITIES, count)
    if rest or not (each == each[0]).all():
        raise ValueError(
            f"{files[1]} does not repeat the same labels for each of five severities, as CIFAR-10-C does. {_AGAIN}"
        )
    part = slice((severity - 1) * count, severity * count)
    return images[part], labels[part]
