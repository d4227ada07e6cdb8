"""The bins in which values are counted: taken from a float32's own bits, so that no pass is needed to find a range.

A positive float's bits, read as an integer, grow with it. Their upper part is a logarithmic bin: `bits >> 17` is 64
bins an octave, 0.8 to 1.6 % wide; `bits >> 22` is 2 an octave. Fine bins cover a window of 24 octaves around the scale
of the target, five above its largest value and the rest below; coarse ones all that is left, down to the denormals and
up to the largest float. Where a row may be negative, its bins are mirrored about that of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 2048  # of a row without negative values; twice as many with
FINE_SHIFT = 17
COARSE_SHIFT = 22
FINE = 1 << (23 - FINE_SHIFT)  # bins an octave
COARSE = 1 << (23 - COARSE_SHIFT)
WINDOW = 24  # octaves in fine bins
BELOW = 18  # of which below the target's largest value
EXPONENTS = 255  # the largest exponent field of a float32

# The last bin that a value can fall into is in the array.
assert 1 + COARSE * (EXPONENTS + 1) - 1 - COARSE * WINDOW + FINE * WINDOW < BINS


def window(curve: Tensor) -> Tensor:
    """The exponent field at which the window of fine bins begins, for the target of a `curve`: a scalar, int32."""
    largest = torch.maximum(curve[1, 0].abs(), curve[1, -1].abs())
    exponent = largest.float().view(torch.int32) >> 23
    return (exponent - BELOW).clamp(0, EXPONENTS - WINDOW)


def edges(start: int) -> Tensor:
    """The lower edges of the bins of positive values, by index `(BINS + 1,)` float32, zero first, for a window `start`.

    >>> edges(112)[[0, 1, 2]]  # zero; what is denormal, or nearly; half an octave on
    tensor([0.0000e+00, 1.4013e-45, 5.8775e-39])
    """
    kc0, k0 = COARSE * start, FINE * start
    below = torch.arange(kc0) << COARSE_SHIFT
    within = (k0 + torch.arange(FINE * WINDOW)) << FINE_SHIFT
    above = torch.arange(kc0 + COARSE * WINDOW, COARSE * (EXPONENTS + 1)) << COARSE_SHIFT
    bits = torch.cat([below, within, above]).to(torch.int32)
    values = bits.view(torch.float32)
    padding = values.new_full((BINS - len(values),), torch.inf)
    return torch.cat(
        [values.new_zeros(1), values.clamp(min=torch.finfo(torch.float32).smallest_normal * 2**-23), padding]
    )
