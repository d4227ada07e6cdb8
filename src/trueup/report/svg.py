"""Plots as inline SVG. Colours are classes, so that the page's style can follow a dark screen.

Plots are 360 units wide, about a phone's width, so text has its nominal size there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 38, 8, 10, 34


class Band(NamedTuple):
    """Three values per position: a line, and the band around it."""

    name: str
    style: str  # class of the page's style
    low: Sequence[float]
    middle: Sequence[float]
    high: Sequence[float]


def depth_plot(
    bands: Sequence[Band], labels: Sequence[str], *, caption: str, x: str, log: bool = False, top: float | None = None
) -> str:
    """Bands along the depth of a network, one position per label. Pointing at a dot shows its label and value."""
    values = [v for band in bands for v in (*band.low, *band.middle, *band.high) if math.isfinite(v)]
    low, high = _limits(values, log=log, top=top)

    def up(value: float) -> float:
        value = min(max(value, low), high) if math.isfinite(value) else high
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def along(k: int) -> float:
        room = WIDTH - LEFT - RIGHT - 12
        return LEFT + 6 + (room / 2 if len(labels) == 1 else k * room / (len(labels) - 1))

    parts = _axis(_ticks(low, high, log=log), up)
    parts.append(f'<text class="t" x="{LEFT}" y="{HEIGHT - 20}">1</text>')
    parts.append(f'<text class="t e" x="{WIDTH - RIGHT}" y="{HEIGHT - 20}">{len(labels)}</text>')
    parts.append(_title_of_x(x))
    for band in bands:
        edge = [(along(k), up(v)) for k, v in enumerate(band.high)]
        edge += [(along(k), up(v)) for k, v in reversed(list(enumerate(band.low)))]
        parts.append(f'<polygon class="{band.style} band" points="{_points(edge)}"/>')
    for band in bands:
        line = [(along(k), up(v)) for k, v in enumerate(band.middle)]
        parts.append(f'<polyline class="{band.style} line" points="{_points(line)}"/>')
        for label, value, (a, b) in zip(labels, band.middle, line, strict=True):
            text = escape(f"{label}: {value:.3g} ({band.name})")
            parts.append(
                f'<circle class="{band.style} dot" cx="{a:.1f}" cy="{b:.1f}" r="2.5"><title>{text}</title></circle>'
            )
    return _svg(parts, caption)


def histogram(
    series: Sequence[tuple[str, str, Sequence[float]]], *, edges: Sequence[float], expected: float, caption: str, x: str
) -> str:
    """Shares per bin, as bars side by side: (name, style, shares) each. A dashed line shows the expected share."""
    high = max([expected * 1.5, *(v for _, _, shares in series for v in shares)])

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - value / high * (HEIGHT - BOTTOM - TOP)

    bins = len(edges) - 1
    room = (WIDTH - LEFT - RIGHT) / bins
    parts = _axis(_ticks(0, high, log=False), up, percent=True)
    for number, (name, style, shares) in enumerate(series):
        width = (room - 3) / len(series)
        for k, share in enumerate(shares):
            a = LEFT + k * room + 1.5 + number * width
            text = escape(f"{edges[k]:g} to {edges[k + 1]:g}: {share:.1%} ({name})")
            parts.append(
                f'<rect class="{style} bar" x="{a:.1f}" y="{up(share):.1f}" width="{width:.1f}" '
                f'height="{HEIGHT - BOTTOM - up(share):.1f}"><title>{text}</title></rect>'
            )
    parts.append(f'<path class="clean dashed" d="M{LEFT} {up(expected):.1f}H{WIDTH - RIGHT}"/>')
    for k in range(0, len(edges), max(1, bins // 5)):
        where = "e" if k == bins else "m" if k else ""
        parts.append(f'<text class="t {where}" x="{LEFT + k * room:.1f}" y="{HEIGHT - 20}">{edges[k]:g}</text>')
    parts.append(_title_of_x(x))
    return _svg(parts, caption)


def _svg(parts: Sequence[str], caption: str) -> str:
    label = escape(caption, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _axis(ticks: Sequence[float], up: Callable[[float], float], *, percent: bool = False) -> list[str]:
    parts = []
    for tick in ticks:
        text = f"{tick:.0%}" if percent else _short(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {up(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="t e" x="{LEFT - 5}" y="{up(tick) + 4:.1f}">{text}</text>')
    return parts


def _short(value: float) -> str:
    """A number that fits beside a plot.

    >>> [_short(v) for v in (0.5, 2000, 20_000, 1_000_000)]
    ['0.5', '2000', '20k', '1M']
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= max(size, 1e4):
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _title_of_x(text: str) -> str:
    return f'<text class="t m" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}">{escape(text)}</text>'


def _limits(values: Sequence[float], *, log: bool, top: float | None) -> tuple[float, float]:
    if not log:
        return 0.0, top if top is not None else max([*values, 1e-9]) * 1.05
    positive = [v for v in values if v > 0] or [1.0]
    low, high = min(min(positive), 0.8) / 1.15, max(max(positive), 1.25) * 1.15
    return low, high


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Round numbers between the limits: about five.

    >>> _ticks(0, 1, log=False), _ticks(0.5, 30, log=True), _ticks(0.5, 3000, log=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.5, 1, 2, 5, 10, 20], [1, 10, 100, 1000])
    """
    if log:
        found = [m * 10.0**e for e in range(-6, 10) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
        if len(found) > 7:
            found = [10.0**e for e in range(-6, 10) if low <= 10.0**e <= high]
        return [int(v) if v >= 1 else v for v in found]
    step = next(s for e in range(-9, 10) for s in (10.0**e, 2 * 10.0**e, 2.5 * 10.0**e, 5 * 10.0**e) if high / s <= 5)
    return [round(k * step, 10) for k in range(int(high / step + 1e-9) + 1)]


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
