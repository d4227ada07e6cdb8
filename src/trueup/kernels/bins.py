"""The bins in which values are counted: taken from a float32's own bits, so that no pass is needed to find a range.

A positive float's bits, read as an integer, grow with it, and their upper part is a logarithmic bin. That is finer than
need be near zero, where a difference counts and digits do not. So the bins are those of `|a| + offset`, 256 to an
octave, with an `offset` of an eighth to a sixteenth of the target's largest value: they have one width up to the
offset, 1/256 of it, and are 0.2 to 0.4 % wide beyond, over seven octaves, to eight to sixteen times the target's
largest value. What lies outside is told apart by its exponent alone, up to the largest float; denormals count as zero.
Where a row may be negative, its bins are mirrored about that of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 2048  # of a row without negative values; twice as many with
SHIFT = 15  # of the bits of `|a| + offset`
FINE = 1 << (23 - SHIFT)  # bins an octave
OCTAVES = 7  # of `|a| + offset`
BELOW = 3  # octaves from the target's largest value down to the offset
OUTSIDE = 8  # octaves below the offset at which exponents begin to count: the width of a bin there
SPAN = OUTSIDE + OCTAVES  # octaves in which they do not

# No value falls into the last bin of the array: a kernel may keep something else there.
assert 255 - SPAN + FINE * OCTAVES < BINS - 1


def offset_exponent(curve: Tensor) -> Tensor:
    """The exponent field of the `offset`, a power of two, for the target of a `curve`: a scalar, int32."""
    largest = torch.maximum(curve[1, 0].abs(), curve[1, -1].abs())
    exponent = largest.float().view(torch.int32) >> 23
    return (exponent - BELOW).clamp(OUTSIDE, 255 - OCTAVES)


def offset_exponent_of_row(largest: Tensor) -> Tensor:
    """The exponent field of an offset that puts fine bins up to the `largest` value of a row, and no farther: int32."""
    return ((largest.float().view(torch.int32) >> 23) - (OCTAVES - 2)).clamp(OUTSIDE, 255 - OCTAVES)


def lower_edges(offset: Tensor) -> Tensor:
    """Where the bins of values that are not negative begin `(..., BINS + 1)` float32, for each `offset` `(..., 1)`.

    The bin of zero is the first.
    """
    exponent = torch.arange(BINS + 1, dtype=torch.int32, device=offset.device).expand(*offset.shape[:-1], BINS + 1)
    first = offset - OUTSIDE  # the exponent at which fine bins begin
    fine = exponent - first
    base = (offset << 23).view(torch.float32)
    within = ((FINE * offset + fine.clamp(0, FINE * OCTAVES)) << SHIFT).view(torch.float32) - base
    outside = torch.where(fine <= 0, exponent, exponent - FINE * OCTAVES + SPAN).clamp(0, 255)
    inside = (fine > 0) & (fine <= FINE * OCTAVES)
    return torch.where(inside, within, (outside << 23).view(torch.float32))
