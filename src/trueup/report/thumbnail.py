"""Thumbnails as PNG, without an imaging library."""

from __future__ import annotations

import struct
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 96  # pixels of the longer side, at most


def thumbnail(image: Tensor, limits: tuple[Tensor, Tensor]) -> bytes:
    """Small PNG of an image `(channels, height, width)` whose channels range between the `limits`.

    One channel is grey; of more than three, the first three are shown. Any other input becomes a row of pixels.
    """
    low, high = limits
    pixels = image.float() if image.dim() == 3 else image.float().reshape(1, 1, -1)
    if image.dim() != 3:
        low, high = low.min()[None], high.max()[None]
    scale = (high - low).clamp(min=1e-12)
    shown = ((pixels - low[:, None, None]) / scale[:, None, None]).nan_to_num(0.5, 1.0, 0.0).clamp(0, 1)
    shown = shown[:3] if len(shown) >= 3 else shown[:1]
    longer = max(shown.shape[1:])
    if longer > SIDE:
        size = [max(1, round(side * SIDE / longer)) for side in shown.shape[1:]]
        shown = F.interpolate(shown[None], size=size, mode="area")[0]
    return png((shown * 255).round().to(torch.uint8))


def png(pixels: Tensor) -> bytes:
    r"""PNG of uint8 pixels `(1 or 3, height, width)`.

    >>> png(torch.zeros(1, 2, 2, dtype=torch.uint8))[:4]
    b'\x89PNG'
    """
    channels, height, width = pixels.shape
    rows = F.pad(pixels.permute(1, 2, 0).reshape(height, width * channels), (1, 0))  # a row begins with its filter: 0
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    body = zlib.compress(rows.numpy().tobytes(), 9)
    parts = [(b"IHDR", header), (b"IDAT", body), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
