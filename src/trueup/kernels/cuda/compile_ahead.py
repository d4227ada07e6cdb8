"""Compiling several kernels at once, in threads: those that a model will need next as well as the one it needs now.

Triton compiles a kernel when it is first launched, in one to two seconds, most of which is spent outside Python. A
model needs five to ten kernels, so its first answer would take that many times as long.

`TRUEUP_COMPILE_THREADS` in the environment sets the number of threads. It is 0 by default, since this has not yet been
timed on a GPU: a kernel is then compiled when it is needed.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

THREADS = int(os.environ.get("TRUEUP_COMPILE_THREADS", "0"))


@functools.lru_cache(maxsize=1024)
def start_compiling(
    kernel: Any,
    types: tuple[Any, ...],
    constants: tuple[Any, ...],
    options: tuple[tuple[str, Any], ...],
    device: torch.device,
) -> Future[None] | None:
    """Start to compile a kernel for arguments of these types, unless that has begun; None if there are too few cores.

    `types` has a dtype in place of each tensor, whose address must be a multiple of 16, and an example of each number.
    """
    if device.type != "cuda" or THREADS < 2:
        return None
    _ = kernel.cache_key  # computed here: two threads that compute it at once get different ones

    def compile_kernel() -> None:
        with torch.cuda.device(device):
            kernel.warmup(*types, *constants, grid=(1, 1, 1), **dict(options))

    return _threads().submit(compile_kernel)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="trueup-compile")
