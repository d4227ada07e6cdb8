"""Compile the kernels of a forward pass at the same time, in threads.

Triton compiles a kernel at its first launch, in one to three seconds, most of which is spent outside Python. A model
needs five to fifteen kernels, so its first answer would take that many times as long. A first pass finds out which
ones: it leaves a site uncorrected if the site's kernel is not compiled yet. Then all of these kernels are compiled
together, and the pass runs again.

The environment variable `TRUEUP_COMPILE_THREADS` sets the number of threads; with 0, each kernel is compiled at its
first launch.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
import triton

Result = TypeVar("Result")

THREADS = int(os.environ.get("TRUEUP_COMPILE_THREADS", str(os.cpu_count() or 1)))


class KernelSpec(NamedTuple):
    """A kernel with everything that determines its compiled code.

    `types` has a dtype for each tensor, whose address must be a multiple of 16, and an example of each number.
    """

    kernel: Any
    types: tuple[Any, ...]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    device: torch.device


class _Pass(threading.local):
    """The forward pass of this thread: the kernels that it skipped, None outside a pass, and whether it can repeat."""

    missing: dict[KernelSpec, None] | None = None
    repeatable: Callable[[], bool]


_PASS = _Pass()
_COMPILED: set[KernelSpec] = set()


def compile_together(run: Callable[[], Result], repeatable: Callable[[], bool]) -> Result:
    """Return run(), a forward pass. It runs a second time if kernels had to be compiled and it is `repeatable`."""
    if _PASS.missing is not None or THREADS < 2:
        return run()
    missing: dict[KernelSpec, None] = {}
    _PASS.missing, _PASS.repeatable = missing, repeatable
    try:
        out = run()
    finally:
        _PASS.missing = None
    if not missing:
        return out
    del out
    contextvars.copy_context().run(_compile, missing)  # discards what Triton sets in its context
    _COMPILED.update(missing)
    return run()


def skip_uncompiled(kernels: list[KernelSpec]) -> bool:
    """Return whether this pass skips these kernels, which are compiled after it.

    If not, their launches compile them. `kernels` keeps only the skipped ones.
    """
    kernels[:] = [kernel for kernel in kernels if kernel not in _COMPILED]
    if not kernels:
        return False
    if _PASS.missing is None or torch.cuda.is_current_stream_capturing() or not _PASS.repeatable():
        _COMPILED.update(kernels)
        kernels.clear()
        return False
    _PASS.missing.update(dict.fromkeys(kernels))
    return True


def _compile(kernels: dict[KernelSpec, None]) -> None:
    """Compile kernels in threads. Errors are ignored here, because the launch raises them again."""
    with (
        contextlib.suppress(Exception),
        ThreadPoolExecutor(min(THREADS, len(kernels)), thread_name_prefix="trueup-compile") as threads,
        triton.AsyncCompileMode(threads),
    ):
        for kernel, types, constants, options, device in kernels:
            with torch.cuda.device(device):
                kernel.warmup(*types, *constants, grid=(1, 1, 1), **dict(options))
