"""Launch Triton kernels with little work on the host."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_START_EARLY = tl.constexpr("griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;")


class Launch:
    """A kernel with a fixed grid and constants. All its calls must need the same compiled code.

    Triton would check this at every launch, which takes longer on the host than most layers take on a GPU. The
    arguments of a call are the tensors, as a tuple, and then the numbers.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], constants: tuple[Any, ...], *, num_warps: int, **options: Any
    ) -> None:
        self.kernel, self.grid, self.constants = kernel, grid, constants
        self.options = {"num_warps": num_warps, **options}
        self.run: Any = None

    def __call__(self, tensors: tuple[Tensor, ...], *numbers: float) -> None:
        if self.run is None:
            self._compile_and_run((*tensors, *numbers))
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        # Addresses, because Triton asks the driver about every tensor. And without the hooks of Triton's own profiler:
        # reading them takes as long as the launch.
        addresses = [tensor.data_ptr() for tensor in tensors]
        self.run(
            *self.grid, stream, self.function, self.metadata, None, None, None, *addresses, *numbers, *self.constants
        )

    def _compile_and_run(self, arguments: tuple[Any, ...]) -> None:
        compiled = self.kernel[self.grid](*arguments, *self.constants, **self.options)
        if compiled is None:  # in the interpreter
            return
        if hasattr(compiled, "finalize_compile"):  # compiled in a thread, beside a kernel that did not compile
            compiled = compiled.result()
        compiled[self.grid]  # loads the code
        self.device = torch.cuda.current_device()
        self.function, self.metadata = compiled.function, compiled.packed_metadata
        self.run = compiled.run


def launch_nothing() -> None:
    """Launch an empty kernel. It raises what stops kernels here: no C compiler, or a GPU that is too old."""
    if torch.cuda.is_available():
        _nothing[(1,)]()


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its address is not a multiple of 16 bytes.

    Triton compiles special code for aligned tensors, which fails for others. Code for unaligned tensors would also sum
    in another order.
    """
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def ready(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is not contiguous or not `aligned`."""
    return aligned(tensor if tensor.is_contiguous() else tensor.contiguous())


def has_ptx(device: torch.device) -> bool:
    """Return whether kernels for this device may contain PTX."""
    return device.type == "cuda" and torch.version.cuda is not None


@functools.cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a device; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def starts_early(device: torch.device, programs: int) -> bool:
    """Return whether a kernel of so many programs should start while the previous kernel still runs.

    This hides launch latency, which dominates small kernels. Large kernels would slow each other down.
    """
    return has_ptx(device) and _capability(device) >= (9, 0) and programs <= processors(device)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def _nothing():
    pass


@triton.jit
def wait_for_previous_kernel(EARLY: tl.constexpr):
    """Let the next kernel start while this one runs, then wait until the previous one's results are in memory."""
    if EARLY:
        tl.inline_asm_elementwise(_START_EARLY, "=r,r", [0], tl.int32, is_pure=False, pack=1)
