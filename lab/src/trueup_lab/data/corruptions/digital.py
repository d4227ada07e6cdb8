"""JPEG compression and pixelation."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trueup_lab.data.corruptions.arithmetic import quantise
from trueup_lab.data.corruptions.jpeg import through_jpeg
from trueup_lab.data.pillow import pillow

if TYPE_CHECKING:
    from PIL.Image import Image


def jpeg_compression(x: Tensor, quality: int) -> Tensor:
    """Encode and decode as Pillow does, to the byte. Bytes."""
    if not _by_pillow(x):
        return through_jpeg(x, quality)

    def code(image: Image) -> Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        decoded: Image = pillow("JPEG").open(file)
        return decoded

    return _each(x, code)


def pixelate(x: Tensor, scale: float) -> Tensor:
    """Shrink by averaging boxes and grow again by repeating pixels, as Pillow's box filter does. Bytes."""
    size = x.shape[-1]
    small = int(size * scale)
    if _by_pillow(x):
        return _each(x, lambda image: _boxed(image, small, size))
    matrix, back = _boxes(size, small, x.device)
    # Pillow goes along the rows first and rounds to bytes in between
    rows = (x.float() @ matrix.T).add_(0.5).floor_()
    shrunk = (matrix @ rows).add_(0.5).floor_().to(torch.uint8)
    return shrunk.index_select(-2, back).index_select(-1, back)


def _boxed(image: Image, small: int, size: int) -> Image:
    from PIL.Image import Resampling

    # growing, the nearest pixel is the one in the box, in half the time
    return image.resize((small, small), Resampling.BOX).resize((size, size), Resampling.NEAREST)


def _by_pillow(x: Tensor) -> bool:
    """Whether to take Pillow: for large images on a CPU it is quicker than torch, and it gives the same bytes."""
    return not x.is_cuda and x.shape[-1] > 64 and find_spec("PIL") is not None


def _each(x: Tensor, change: Callable[[Image], Image]) -> Tensor:
    """Put every image (three planes) through Pillow, one by one: threads would wait for each other most of the time."""
    module = pillow("this")
    out = np.empty(x.shape, dtype=np.uint8)
    for planes, result in zip(x.numpy(), out, strict=True):
        # Pillow merges and splits planes quicker than NumPy moves the axis
        image = module.merge("RGB", [module.fromarray(plane) for plane in planes])
        for k, changed in enumerate(change(image).split()):
            result[k] = np.asarray(changed)
    return torch.from_numpy(out)


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
