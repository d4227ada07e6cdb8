"""Histogram bins, computed from the bits of a float32: no pass over the values is needed to find their range.

The bits of a positive float, read as an integer, grow with its value, and their upper part is a logarithmic bin. Plain
logarithmic bins would be far too fine near zero. Values are therefore binned by `|a| + offset`, with 256 bins per
octave and an `offset` of 1/8 to 1/16 of the target's largest value. Up to the offset, bins have one width, 1/256 of it.
Beyond, over seven octaves, up to 8 to 16 times the target's largest value, they are 0.2 to 0.4 % wide. Outside this
range, up to the largest float, a value's exponent alone is its bin; denormals count as zero. If rows may be negative,
the bins are mirrored about the bin of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 2048  # for rows without negative values; twice as many with them
SHIFT = 15  # low bits of `|a| + offset` that are shifted out
FINE = 1 << (23 - SHIFT)  # bins per octave
OCTAVES = 7  # octaves of `|a| + offset` that have fine bins
BELOW = 3  # octaves from the target's largest value down to the offset
OUTSIDE = 8  # octaves from the offset down to the width of its bins, below which the exponent is the bin
SPAN = OUTSIDE + OCTAVES  # octaves that fine bins replace

# No value falls into the last bin of the array, so a kernel may use its entry for something else.
assert 255 - SPAN + FINE * OCTAVES < BINS - 1


def offset_exponent(curve: Tensor) -> Tensor:
    """Exponent field of the `offset`, a power of two, for the target of a `curve`: int32 scalar."""
    largest = torch.maximum(curve[1, 0].abs(), curve[1, -1].abs())
    exponent = largest.float().view(torch.int32) >> 23
    return (exponent - BELOW).clamp(OUTSIDE, 255 - OCTAVES)


def offset_exponent_of_row(largest: Tensor) -> Tensor:
    """Exponent field of the offset whose fine bins end at the `largest` absolute value of a row: int32."""
    return ((largest.float().view(torch.int32) >> 23) - (OCTAVES - 2)).clamp(OUTSIDE, 255 - OCTAVES)


def bin_of(a: Tensor, offset: Tensor, *, signed: bool) -> Tensor:
    """Bin of each float32, int64, ascending with the value. `offset` is an exponent field (`offset_exponent`)."""
    size = a.abs()
    exponent = size.view(torch.int32) >> 23
    fine = (size + (offset << 23).view(torch.float32)).view(torch.int32) >> SHIFT
    index = exponent - (exponent - (offset - OUTSIDE)).clamp(0, SPAN)
    index = (index + (fine - FINE * offset).clamp(0, FINE * OCTAVES)).long()
    return BINS + torch.where(a < 0, -index, index) if signed else index


def lower_edges(offset: Tensor) -> Tensor:
    """Lower edges of the bins of non-negative values `(..., BINS + 1)` float32, for each `offset` `(..., 1)`.

    The first bin is that of zero.
    """
    exponent = torch.arange(BINS + 1, dtype=torch.int32, device=offset.device).expand(*offset.shape[:-1], BINS + 1)
    first = offset - OUTSIDE  # exponent at which fine bins begin
    fine = exponent - first
    base = (offset << 23).view(torch.float32)
    within = ((FINE * offset + fine.clamp(0, FINE * OCTAVES)) << SHIFT).view(torch.float32) - base
    outside = torch.where(fine <= 0, exponent, exponent - FINE * OCTAVES + SPAN).clamp(0, 255)
    inside = (fine > 0) & (fine <= FINE * OCTAVES)
    return torch.where(inside, within, (outside << 23).view(torch.float32))
