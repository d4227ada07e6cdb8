"""Starting Triton kernels with little work for the host."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


class Launch:
    """`kernel[grid](*arguments, *constants)`, always with arguments that Triton would compile the same code for.

    To find that out again each time takes Triton longer, on the host, than most layers take on a GPU.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], constants: tuple[Any, ...], *, num_warps: int, **options: Any
    ) -> None:
        self.kernel, self.grid, self.constants = kernel, grid, constants
        self.options = {"num_warps": num_warps, **options}
        self.compiled: Any = None

    def __call__(self, *arguments: Any) -> None:
        if self.compiled is None:
            compiled = self.kernel[self.grid](*arguments, *self.constants, **self.options)
            if compiled is not None:  # as it is in the interpreter
                self.compiled = compiled[self.grid]
        else:
            self.compiled(*arguments, *self.constants)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it does not begin at a multiple of 16 bytes.

    Triton compiles code for tensors that do, which others must not get; and what is read in other portions is added up
    in another order.
    """
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def has_ptx(device: torch.device) -> bool:
    """Whether kernels for a device may hold PTX."""
    return device.type == "cuda" and torch.version.cuda is not None


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel can be brought to a device's processors while the one before it still runs, to wait there."""
    return has_ptx(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs a device can run at once, each on a processor of its own; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
