"""The photographs of frost that the frost corruption lays over an image."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trueup_lab.data.root import DataRoot, MissingDataError, data_root

FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")  # the originals never draw the sixth


def textures(
    scale: float,
    device: torch.device,
    root: DataRoot = None,
    *,
    at_least: tuple[int, int] = (1, 1),
) -> list[Tensor]:
    """Return the five textures, (3, height, width) uint8, from the folder `frost` of the data root.

    They are shrunk by `scale` as OpenCV's bilinear resize does. A texture that does not cover `at_least`
    (height, width) is enlarged until it does.
    """
    folder = data_root(root) / "frost"
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        raise MissingDataError(
            f"frost textures {', '.join(missing)} are missing from {folder}; "
            "copy them from ImageNet-C/create_c of github.com/hendrycks/robustness"
        )
    return [_covering(folder / name, scale, device, *at_least) for name in FILES]


def _covering(path: Path, scale: float, device: torch.device, height: int, width: int) -> Tensor:
    texture = _texture(path, scale, device)
    rows, cols = texture.shape[-2:]
    growth = max(height / rows, width / cols)
    if growth <= 1:
        return texture
    return _enlarged(path, scale, device, max(height, math.ceil(rows * growth)), max(width, math.ceil(cols * growth)))


@lru_cache(maxsize=16)
def _texture(path: Path, scale: float, device: torch.device) -> Tensor:
    """Shrink by one over an odd number: OpenCV's bilinear samples then fall on pixels, and nothing is averaged."""
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    step = round(1 / scale)
    rows, cols = (round(side * scale) for side in pixels.shape[-2:])
    return pixels[:, step // 2 :: step, step // 2 :: step][:, :rows, :cols].contiguous().to(device)


@lru_cache(maxsize=16)
def _enlarged(path: Path, scale: float, device: torch.device, height: int, width: int) -> Tensor:
    """Resize on the CPU, so that all devices get the same bytes."""
    image = Image.fromarray(_texture(path, scale, torch.device("cpu")).permute(1, 2, 0).contiguous().numpy())
    pixels = torch.from_numpy(np.array(image.resize((width, height), Image.Resampling.BICUBIC)))
    return pixels.permute(2, 0, 1).contiguous().to(device)
