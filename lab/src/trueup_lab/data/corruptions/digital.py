"""JPEG compression and pixelation."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trueup_lab.data.corruptions.arithmetic import quantise
from trueup_lab.data.corruptions.jpeg import through_jpeg


def jpeg_compression(x: Tensor, quality: int) -> Tensor:
    """Encode and decode as Pillow does, to the byte. Returns uint8."""
    if not _by_pillow(x):
        return through_jpeg(x, quality)

    def code(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _each(x, code)


def pixelate(x: Tensor, scale: float) -> Tensor:
    """Shrink by averaging boxes and enlarge by repeating pixels, as Pillow's box filter does. Returns uint8."""
    height, width = x.shape[-2:]
    if _by_pillow(x):
        return _each(x, lambda image: _boxed(image, scale))
    down, back_rows = _boxes(height, int(height * scale), x.device)
    across, back_cols = _boxes(width, int(width * scale), x.device)
    # Pillow shrinks the rows first, and rounds to bytes in between
    rows = (x.float() @ across.T).add_(0.5).floor_()
    shrunk = (down @ rows).add_(0.5).floor_().to(torch.uint8)
    return shrunk.index_select(-2, back_rows).index_select(-1, back_cols)


def _boxed(image: Image.Image, scale: float) -> Image.Image:
    small = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BOX)
    # growing by the nearest pixel gives the same as the box filter, in half the time
    return small.resize(image.size, Image.Resampling.NEAREST)


def _by_pillow(x: Tensor) -> bool:
    """Whether to use Pillow: on a CPU it is faster than torch for large images, with the same result."""
    return not x.is_cuda and max(x.shape[-2:]) > 64


def _each(x: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Put every image (three planes) through Pillow, one by one: threads would mostly wait for each other."""
    out = np.empty(x.shape, dtype=np.uint8)
    for planes, result in zip(x.numpy(), out, strict=True):
        # Pillow merges and splits planes faster than NumPy moves the axis
        image = Image.merge("RGB", [Image.fromarray(plane) for plane in planes])
        for k, changed in enumerate(change(image).split()):
            result[k] = np.asarray(changed)
    return torch.from_numpy(out)


@lru_cache(maxsize=32)
def _boxes(size: int, small: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the (small, size) averaging matrix, exact in float32 products, and the source of each enlarged pixel."""
    scale = size / small
    centre = (torch.arange(small, dtype=torch.float64) + 0.5) * scale
    at = (torch.arange(size, dtype=torch.float64) + 0.5 - centre[:, None]) / scale
    inside = ((at > -0.5) & (at <= 0.5)).double()  # Pillow's box takes whole pixels, by their centres
    matrix = quantise(inside / inside.sum(1, keepdim=True)).float()
    grown = ((torch.arange(size, dtype=torch.float64) + 0.5) / scale).floor().long()
    return matrix.to(device), grown.to(device)
