"""Contact sheets: every corruption and severity of a benchmark on one page."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from trueup_lab.data.corruptions import corruption_names, severities

SheetSource = Callable[[str, int | None], Tensor]
"""(corruption, severity) -> images (N, C, H, W) uint8; the severity is None for a corruption without severities."""

_MARGIN, _NAMES, _LINE, _SIDE = 4, 130, 14, 64


def contact_sheet(family: str, source: SheetSource) -> Image.Image:
    """Draw one row per corruption, with one block of images per severity.

    Small images are enlarged by a whole factor, to at most 64 pixels.
    """
    rows = []
    for name in corruption_names(family):
        steps: tuple[int | None, ...] = severities(family, name) or (None,)
        rows.append((name, [_strip(source(name, step)) for step in steps]))
    height = max(strip.height for _, strips in rows for strip in strips) + _MARGIN
    width = max(sum(strip.width + 3 * _MARGIN for strip in strips) for _, strips in rows)
    page = Image.new("RGB", (_NAMES + width, _LINE + height * len(rows)), "white")
    pen = ImageDraw.Draw(page)
    longest = max((strips for _, strips in rows), key=len)
    left = _NAMES
    for step, strip in enumerate(longest, 1):
        pen.text((left, 1), f"severity {step}", fill="black")
        left += strip.width + 3 * _MARGIN
    for k, (name, strips) in enumerate(rows):
        top, left = _LINE + k * height, _NAMES
        pen.text((_MARGIN, top + height // 2 - 6), name, fill="black")
        for strip in strips:
            page.paste(strip, (left, top))
            left += strip.width + 3 * _MARGIN
    return page


def _strip(images: Tensor) -> Image.Image:
    """Draw images side by side."""
    pixels = images.cpu().expand(-1, 3, -1, -1)
    factor = max(1, _SIDE // pixels.shape[-1])
    pixels = pixels.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    gap = torch.full((len(pixels), 3, pixels.shape[-2], 1), 255, dtype=torch.uint8)
    joined = torch.cat(list(torch.cat((pixels, gap), -1)), -1)
    return Image.fromarray(np.ascontiguousarray(joined.permute(1, 2, 0).numpy()))
