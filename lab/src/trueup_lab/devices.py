"""Names of devices for records and tables."""

from __future__ import annotations

import torch


def device_name(device: torch.device | str) -> str:
    """Return the GPU's product name, or "cpu".

    >>> device_name("cpu")
    'cpu'
    """
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
