"""What all processes of a `torch.distributed` group have."""

from __future__ import annotations

from typing import TypeVar

from torch import distributed

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """The values of all ranks, in their order; this one's alone where there is no group. All ranks must call it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values = [value] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
