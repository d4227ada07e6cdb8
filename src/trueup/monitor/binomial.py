"""Exact confidence bounds for a share of images."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Share(NamedTuple):
    """A share of images, and the bounds of its 95 % confidence interval (Clopper and Pearson)."""

    value: float
    low: float
    high: float


def share_of(part: int, whole: int, *, confidence: float = 0.95) -> Share:
    """Share `part` / `whole` with exact bounds; they are 0 and 1, and the share NaN, if there are no images.

    >>> Share(*(round(x, 4) for x in share_of(3, 100)))
    Share(value=0.03, low=0.0062, high=0.0852)
    """
    if whole == 0:
        return Share(math.nan, 0.0, 1.0)
    tail = (1 - confidence) / 2
    low = 0.0 if part == 0 else _solve(lambda x: beta_cdf(x, part, whole - part + 1), tail)
    high = 1.0 if part == whole else _solve(lambda x: beta_cdf(x, part + 1, whole - part), 1 - tail)
    return Share(part / whole, low, high)


def beta_cdf(x: float, a: float, b: float) -> float:
    """Distribution function of the beta distribution: the regularised incomplete beta function I_x(a, b)."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the continued fraction converges fast on the other side only
        return 1 - beta_cdf(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """Continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _not_zero(1 + term * d, tiny)
            c = _not_zero(1 + term / c, tiny)
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return value


def _not_zero(x: float, tiny: float) -> float:
    return x if abs(x) > tiny else tiny


def _solve(increasing: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < wanted else (low, middle)
    return (low + high) / 2
