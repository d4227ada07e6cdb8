"""Durations in words."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Format a time in suitable units.

    >>> duration(47), duration(600), duration(8000)
    ('47 s', '10 min', '2 h 13 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
