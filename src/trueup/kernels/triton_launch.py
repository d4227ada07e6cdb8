"""Starting Triton kernels with little work for the host."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_OVERLAP = tl.constexpr("griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;")


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
def processors(device: torch.device) -> int:
    """How many programs a device can run at once, each on a processor of its own; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def overlaps(device: torch.device, programs: int) -> bool:
    """Whether kernels of as many programs should be brought to the processors while the one before still runs.

    That hides how long it takes to start them, where that is long beside the work; many would be in each other's way.
    """
    return has_ptx(device) and _capability(device) >= (9, 0) and programs <= processors(device)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def overlap(EARLY: tl.constexpr):
    """Let the next kernel come while this one runs, and wait for the one before: what it wrote is there from now on."""
    if EARLY:
        tl.inline_asm_elementwise(_OVERLAP, "=r,r", [0], tl.int32, is_pure=False, pack=1)
