"""Words for people: devices, durations."""

from __future__ import annotations

import platform

import torch


def device_name(device: str) -> str:
    """The make of `device`.

    >>> device_name("cpu") != ""
    True
    """
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"


def duration(seconds: float) -> str:
    """Time for people.

    >>> duration(47), duration(600), duration(8000)
    ('47 s', '10 min', '2 h 13 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
