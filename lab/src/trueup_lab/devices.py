"""Check the device name that a user gave, and name devices in records and tables."""

from __future__ import annotations

import torch


def find_device(name: str | None = None) -> str:
    """Return the device called `name` if it works here; None is the GPU if there is one, else the CPU.

    >>> find_device("cpu")
    'cpu'
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r}: expected cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        built = "torch was installed without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise ValueError(f"device={name!r}: {built}; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: this machine has {torch.cuda.device_count()} GPUs, counted from cuda:0")
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise ValueError(f"device={name!r} does not work here ({str(error).splitlines()[0]}); use cpu") from None
    return name


def device_name(device: torch.device | str) -> str:
    """Return the GPU's product name, or "cpu".

    >>> device_name("cpu")
    'cpu'
    """
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
