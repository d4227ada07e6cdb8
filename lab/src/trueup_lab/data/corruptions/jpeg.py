"""JPEG compression and decompression of batches on any device, with exactly the bytes of libjpeg, and so of Pillow.

Entropy coding is lossless, so no file is written. The rest is integer arithmetic, as in libjpeg: its fixed-point colour
conversion, its "islow" cosine transform and its triangle filter for chroma. Each step is a linear map of integers and a
rounded shift, which float64 holds exactly in any order of addition.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

# ITU T.81, annex K: the quantisation tables of quality 50
_LUMA = """
    16 11 10 16 24 40 51 61  12 12 14 19 26 58 60 55  14 13 16 24 40 57 69 56  14 17 22 29 51 87 80 62
    18 22 37 56 68 109 103 77  24 35 55 64 81 104 113 92  49 64 78 87 103 121 120 101  72 92 95 98 112 100 103 99
"""
_CHROMA = """
    17 18 24 47 99 99 99 99  18 21 26 66 99 99 99 99  24 26 56 99 99 99 99 99  47 66 99 99 99 99 99 99
    99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99  99 99 99 99 99 99 99 99
"""


def through_jpeg(x: Tensor, quality: int) -> Tensor:
    """Encode and decode RGB images (N, 3, H, W) uint8 at `quality`, with chroma at half the resolution.

    Like libjpeg, the encoder fills blocks by repeating the last row and column, and the decoder enlarges chroma
    from the pixels inside the image only.
    """
    height, width = x.shape[-2:]
    luma, blueness, redness = _to_ycc(x)
    steps = _table(_CHROMA, quality, x.device)
    y = _coded(_padded(luma, 8, 8), _table(_LUMA, quality, x.device))[:, :height, :width]

    def coded_chroma(plane: Tensor) -> Tensor:
        # columns are repeated before halving, rows after it
        small = _padded(_halved(_padded(plane, 2, 16)), 8, 8)
        inside = _coded(small, steps)[:, : (height + 1) // 2, : (width + 1) // 2]
        return _doubled(inside)[:, :height, :width] - 128

    cb, cr = coded_chroma(blueness), coded_chroma(redness)
    # FIX(v) of libjpeg is v * 2**16, rounded
    r = y + _shifted(91881 * cr + 2**15, 16)
    g = y + _shifted(-22554 * cb - 46802 * cr + 2**15, 16)
    b = y + _shifted(116130 * cb + 2**15, 16)
    return torch.stack((r, g, b), 1).clamp_(0, 255).to(torch.uint8)


def _to_ycc(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r, g, b = x.double().unbind(1)
    middle = float((128 << 16) + 2**15 - 1)
    return (
        _shifted(19595 * r + 38470 * g + 7471 * b + 2**15, 16),
        _shifted(-11059 * r - 21709 * g + 32768 * b + middle, 16),
        _shifted(32768 * r - 27439 * g - 5329 * b + middle, 16),
    )


def _padded(plane: Tensor, rows: int, cols: int) -> Tensor:
    """Repeat the last row and column until the height is a multiple of `rows` and the width of `cols`."""
    height, width = plane.shape[-2:]
    return F.pad(plane, (0, -width % cols, 0, -height % rows), mode="replicate")


def _coded(plane: Tensor, table: Tensor) -> Tensor:
    """Transform 8 x 8 blocks, quantise, and transform back. `plane` (N, H, W) holds integers 0 to 255."""
    count, height, width = plane.shape
    matrix = _cosines(plane.device)
    steps = table.repeat(1, width // 8)
    rows = _shifted((plane - 128).reshape(-1, 8) @ matrix.T + 2**10, 11)
    both = _shifted(matrix @ rows.view(-1, 8, width) + 2**14, 15)  # eight times the coefficients
    levels = torch.sign(both) * torch.floor((both.abs() + 4 * steps) / (8 * steps))
    columns = _shifted(matrix.T @ (levels * steps) + 2**10, 11)
    back = _shifted(columns.view(-1, 8) @ matrix + 2**17, 18) + 128
    return back.clamp_(0, 255).view(count, height, width)


def _halved(plane: Tensor) -> Tensor:
    """Average 2 x 2 pixels, rounding halves down and up in turn."""
    rows = plane[:, ::2] + plane[:, 1::2]
    total = rows[..., ::2] + rows[..., 1::2]
    bias = 1 + torch.arange(total.shape[-1], device=plane.device) % 2
    return _shifted(total + bias, 2)


def _doubled(plane: Tensor) -> Tensor:
    """Double the size: 9/16 of the nearest pixel, 3/16 of two others, 1/16 of the fourth; edges repeated."""
    count, height, width = plane.shape
    tall = F.pad(plane.unsqueeze(1), (0, 0, 1, 1), mode="replicate")[:, 0]
    pairs = torch.stack((3 * plane + tall[:, :-2], 3 * plane + tall[:, 2:]), 2).view(count, 2 * height, width)
    wide = F.pad(pairs, (1, 1), mode="replicate")
    left, right = 3 * pairs + wide[..., :-2] + 8, 3 * pairs + wide[..., 2:] + 7
    return _shifted(torch.stack((left, right), 3).view(count, 2 * height, 2 * width), 4)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return torch.floor(x * 2.0**-bits)


@lru_cache(maxsize=64)
def _table(base: str, quality: int, device: torch.device) -> Tensor:
    """Quantisation steps, (8, 8)."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = [min(max((int(value) * scale + 50) // 100, 1), 255) for value in base.split()]
    return torch.tensor(steps, dtype=torch.float64, device=device).view(8, 8)


@lru_cache(maxsize=8)
def _cosines(device: torch.device) -> Tensor:
    """Matrix (8, 8) of libjpeg's islow transform (Loeffler, Ligtenberg and Moschytz, 1989) times 2**13, in integers.

    It is the butterflies' result for the unit vectors.
    """
    x0, x1, x2, x3, x4, x5, x6, x7 = torch.eye(8, dtype=torch.float64).unbind(0)
    even = x0 + x7, x1 + x6, x2 + x5, x3 + x4
    outer, inner = even[0] - even[3], even[1] - even[2]
    sums = even[0] + even[3], even[1] + even[2]
    shared = (inner + outer) * 4433
    a, b, c, d = x3 - x4, x2 - x5, x1 - x6, x0 - x7
    turn = (a + c + b + d) * 9633
    ad, bc, ac, bd = -7373 * (a + d), -20995 * (b + c), turn - 16069 * (a + c), turn - 3196 * (b + d)
    rows = (
        (sums[0] + sums[1]) * 2**13,
        12299 * d + ad + bd,
        shared + 6270 * outer,
        25172 * c + bc + ac,
        (sums[0] - sums[1]) * 2**13,
        16819 * b + bc + bd,
        shared - 15137 * inner,
        2446 * a + ad + ac,
    )
    return torch.stack(rows).to(device)
