"""Images from a folder or an array file, in batches as a model takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

Preprocess = Callable[[Any], Tensor]
"""Turns a Pillow image into the tensor that the model takes, without the batch dimension."""


@dataclass(frozen=True)
class NamedImages:
    """Batches of images, to be read once, and the name of each image."""

    batches: Iterator[Tensor]
    names: Sequence[str]

    def __iter__(self) -> Iterator[Tensor]:
        return self.batches


def read_images(path: Path, preprocess: Preprocess | None, *, batch: int = 32, limit: int | None = None) -> NamedImages:
    """Return the images in a folder, in the order of their names; or those of a .npy file of ready inputs.

    Images are called by their paths in the folder, or by their numbers in the array, from 0. `limit` takes the first
    images only. Image files need Pillow and a `preprocess`.
    """
    if path.is_file() and path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        count = len(array) if limit is None else min(limit, len(array))
        batches = (
            torch.tensor(np.array(array[k : min(k + batch, count)]), device="cpu") for k in range(0, count, batch)
        )
        return NamedImages(batches, [f"{path.name}[{k}]" for k in range(count)])
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ValueError(f"{path} {what}; give a folder of images, or a .npy file of ready inputs (images, ...)")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)[:limit]
    if not files:
        raise ValueError(f"{path} holds no images; known suffixes: {', '.join(SUFFIXES)}")
    if preprocess is None:
        raise ValueError(
            f"{path} holds image files, but this model does not say how to preprocess them: let the function of MODEL "
            "return (model, preprocess), with preprocess(image) -> tensor; or give a .npy file of ready inputs"
        )
    return NamedImages(_batches(files, preprocess, batch), [file.relative_to(path).as_posix() for file in files])


def _batches(files: list[Path], preprocess: Preprocess, batch: int) -> Iterator[Tensor]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading image files needs Pillow: pip install 'trueup[report]'") from error
    for k in range(0, len(files), batch):
        tensors = list[Tensor]()
        for file in files[k : k + batch]:
            with Image.open(file) as image:
                tensors.append(preprocess(image))
            if tensors[-1].shape != tensors[0].shape:
                raise ValueError(
                    f"preprocess turned {file} into a tensor of shape {tuple(tensors[-1].shape)}, and {files[k]} into "
                    f"{tuple(tensors[0].shape)}; resize and crop all images to one size there, or give --batch 1 if "
                    "the model takes any size"
                )
        yield torch.stack(tensors)
