"""JPEG compression and pixelation."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from trueup.data.corruptions.arithmetic import quantise


def jpeg_compression(x: Tensor, quality: int) -> Tensor:
    """Encode and decode with Pillow, on the CPU, in as many threads as there are cores. Bytes."""
    pixels = x.permute(0, 2, 3, 1).cpu().contiguous().numpy()
    out = np.empty_like(pixels)

    def code(k: int) -> None:
        out[k] = _through_jpeg(pixels[k], quality)

    if torch.get_num_threads() == 1:
        for k in range(len(pixels)):
            code(k)
    else:
        list(_pool().map(code, range(len(pixels))))
    return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous().to(x.device)


def pixelate(x: Tensor, scale: float) -> Tensor:
    """Shrink by averaging boxes and grow again by repeating pixels, as Pillow's box filter does. Bytes."""
    size = x.shape[-1]
    matrix, back = _boxes(size, int(size * scale), x.device)
    # Pillow goes along the rows first and rounds to bytes in between
    rows = (x.float() @ matrix.T).add_(0.5).floor_()
    small = (matrix @ rows).add_(0.5).floor_().to(torch.uint8)
    return small.index_select(-2, back).index_select(-1, back)


def _through_jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    with Image.open(file) as image:
        return np.asarray(image)


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count())


@lru_cache(maxsize=32)
def _boxes(size: int, small: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The (small, size) averaging matrix, its weights exact in float32 products, and the way back."""
    scale = size / small
    centre = (torch.arange(small, dtype=torch.float64) + 0.5) * scale
    at = (torch.arange(size, dtype=torch.float64) + 0.5 - centre[:, None]) / scale
    inside = ((at > -0.5) & (at <= 0.5)).double()  # Pillow's box: whole pixels, by their centres
    matrix = quantise(inside / inside.sum(1, keepdim=True)).float()
    grown = ((torch.arange(size, dtype=torch.float64) + 0.5) / scale).floor().long()
    return matrix.to(device), grown.to(device)
