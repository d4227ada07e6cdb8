"""Triton's copy of `trueup.kernels.bins`."""

from __future__ import annotations

import triton
import triton.language as tl

from trueup.kernels.bins import BELOW, BINS, FINE, OCTAVES, OUTSIDE, SHIFT, SPAN

_HALF = tl.constexpr(BINS)
_SHIFT = tl.constexpr(SHIFT)
_FINE = tl.constexpr(FINE)
_OCTAVES = tl.constexpr(OCTAVES)
_BELOW = tl.constexpr(BELOW)
_OUTSIDE = tl.constexpr(OUTSIDE)
_SPAN = tl.constexpr(SPAN)


@triton.jit
def offset_exponent(curve, m):
    """As `bins.offset_exponent`."""
    first = tl.abs(tl.load(curve + m).to(tl.float32))
    last = tl.abs(tl.load(curve + 2 * m - 1).to(tl.float32))
    return _offset_below(tl.maximum(first, last), _BELOW)


@triton.jit
def offset_exponent_of_row(least, most):
    """As `bins.offset_exponent_of_row`, from the smallest and the largest value of a row."""
    return _offset_below(tl.maximum(tl.abs(least), tl.abs(most)), _OCTAVES - 2)


@triton.jit
def _offset_below(largest, octaves: tl.constexpr):
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(exponent - octaves, _OUTSIDE), 255 - _OCTAVES)


@triton.jit
def bin_of_zero(SIGNED: tl.constexpr):
    return _HALF if SIGNED else 0


@triton.jit
def bin_of(a, offset, SIGNED: tl.constexpr):
    """Bin of each value, as `bins.bin_of`, except that denormals share the bin of zero."""
    bits = a.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF if SIGNED else bits
    coarse = size >> 23
    coarse = tl.maximum(tl.minimum(coarse, offset - _OUTSIDE), coarse - _SPAN)
    far = size.to(tl.float32, bitcast=True) + (offset << 23).to(tl.float32, bitcast=True)
    fine = (far.to(tl.int32, bitcast=True) >> _SHIFT) - offset * _FINE
    index = coarse + tl.minimum(fine, _FINE * _OCTAVES)
    return _HALF + tl.where(bits < 0, -index, index) if SIGNED else index


@triton.jit
def lower_edge(index, offset):
    """Lower edge of a bin of non-negative values, as `bins.lower_edges`."""
    fine = index - (offset - _OUTSIDE)
    within = ((offset * _FINE + tl.minimum(tl.maximum(fine, 0), _FINE * _OCTAVES)) << _SHIFT).to(
        tl.float32, bitcast=True
    )
    outside = tl.where(fine <= 0, index, index - _FINE * _OCTAVES + _SPAN)
    outside = (tl.minimum(tl.maximum(outside, 0), 255) << 23).to(tl.float32, bitcast=True)
    inside = (fine > 0) & (fine <= _FINE * _OCTAVES)
    return tl.where(inside, within - (offset << 23).to(tl.float32, bitcast=True), outside)
