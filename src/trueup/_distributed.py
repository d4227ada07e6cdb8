"""Gather values from all processes of a `torch.distributed` group."""

from __future__ import annotations

from typing import TypeVar

from torch import distributed

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """Gather a value from all ranks, in order; without a group, only this process's. All ranks must call it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values = [value] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
