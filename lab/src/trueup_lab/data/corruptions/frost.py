"""The photographs of frost that the frost corruption lays over an image."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trueup_lab.data.pillow import pillow
from trueup_lab.data.root import MissingDataError, data_root

FILES = (
    "frost1.png",
    "frost2.png",
    "frost3.png",
    "frost4.jpg",
    "frost5.jpg",
)  # the originals never reach the sixth


def textures(scale: float, device: torch.device, root: str | os.PathLike[str] | None = None) -> list[Tensor]:
    """The five textures, (3, height, width) uint8, shrunk by `scale` as OpenCV's bilinear resize does.

    They are read from the folder `frost` of the data root.
    """
    return _textures(data_root(root) / "frost", scale, device)


@lru_cache(maxsize=8)
def _textures(folder: Path, scale: float, device: torch.device) -> list[Tensor]:
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        raise MissingDataError(
            f"the frost corruption needs its textures, and {', '.join(missing)} of {folder} is not there; "
            "take them from ImageNet-C/create_c of github.com/hendrycks/robustness"
        )
    return [_shrunk(_read(folder / name), scale).to(device) for name in FILES]


def _read(path: Path) -> Tensor:
    with pillow("the frost corruption").open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _shrunk(image: Tensor, scale: float) -> Tensor:
    """OpenCV's bilinear resize by one over an odd number: samples fall on pixels, nothing is averaged."""
    step = round(1 / scale)
    rows, cols = (round(side * scale) for side in image.shape[-2:])
    return image[:, step // 2 :: step, step // 2 :: step][:, :rows, :cols].contiguous()
