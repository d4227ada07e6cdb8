"""CamVid (Brostow et al., 2009) in the copy of the SegNet tutorial: 480 x 360, eleven classes and void."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trueup_lab.data.images import Images, Split
from trueup_lab.data.root import DataRoot, MissingDataError, data_root

CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree"),
    *("sign", "fence", "car", "pedestrian", "bicyclist"),
)
VOID = len(CLASSES)
"""The label of pixels that do not count."""

SUFFIXES = (".png", ".webp")


def load(split: Split, root: DataRoot = None) -> Images:
    """Read the `train` or `test` images (N, 3, 360, 480), red first, with labels (N, 360, 480), in the order of names.

    Folders are those of the tutorial: `camvid/CamVid/test` and `testannot`, as PNG or WebP. Where a split has no masks,
    all its pixels are void.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r} of CamVid; known: train, test")
    base = data_root(root) / "camvid" / "CamVid"
    files = _files(base / split)
    if not files:
        raise MissingDataError(
            f"no images of CamVid in {base / split}; put the SegNet tutorial's copy (folders train, test, testannot) "
            f"into {base}, or set TRUEUP_DATA. It is free for non-commercial use"
        )
    with ThreadPoolExecutor(4) as pool:
        images = torch.stack(list(pool.map(_picture, files)))
    masks = {path.stem: path for path in _files(base / f"{split}annot")}
    if not masks:
        return Images(images, torch.full((len(files), *images.shape[2:]), VOID, dtype=torch.uint8))
    if missing := [path.name for path in files if path.stem not in masks]:
        raise MissingDataError(f"{base / f'{split}annot'} has no mask for {missing[0]}; get the whole set again")
    return Images(images, torch.stack([_mask(masks[path.stem]) for path in files]))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in SUFFIXES)


def _picture(path: Path) -> Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _mask(path: Path) -> Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image)).to(torch.uint8)
