"""Compile the kernels of a forward pass at the same time, in threads.

Triton compiles a kernel when it is first launched, in one to three seconds, most of which is spent outside Python. A
model needs five to fifteen kernels, so its first answer would take that many times as long. Which ones it needs is
known after a pass. So a pass that meets kernels which are not compiled yet leaves these sites uncorrected; then the
kernels are compiled together, and the pass is run again.

`TRUEUP_COMPILE_THREADS` in the environment sets the number of threads; with 0, a kernel is compiled when it is needed.
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


class Need(NamedTuple):
    """Everything that decides what Triton compiles.

    `types` has a dtype in place of each tensor, whose address must be a multiple of 16, and an example of each number.
    """

    kernel: Any
    types: tuple[Any, ...]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    device: torch.device


class _Pass(threading.local):
    """The forward pass of this thread: the kernels that it did without, or None; and whether it can be repeated."""

    missing: dict[Need, None] | None = None
    repeatable: Callable[[], bool]


_PASS = _Pass()
_COMPILED: set[Need] = set()


def compile_together(run: Callable[[], Result], repeatable: Callable[[], bool]) -> Result:
    """Return run(), a forward pass. It runs twice if kernels had to be compiled and it is `repeatable`."""
    if _PASS.missing is not None or THREADS < 2:
        return run()
    missing: dict[Need, None] = {}
    _PASS.missing, _PASS.repeatable = missing, repeatable
    try:
        out = run()
    finally:
        _PASS.missing = None
    if not missing:
        return out
    del out
    contextvars.copy_context().run(_compile, missing)  # whatever Triton sets in its context is gone afterwards
    _COMPILED.update(missing)
    return run()


def put_off(needs: list[Need]) -> bool:
    """Return whether this pass does without these kernels. If not, they get compiled, and `needs` is emptied."""
    needs[:] = [need for need in needs if need not in _COMPILED]
    if not needs:
        return False
    if _PASS.missing is None or torch.cuda.is_current_stream_capturing() or not _PASS.repeatable():
        _COMPILED.update(needs)
        needs.clear()
        return False
    _PASS.missing.update(dict.fromkeys(needs))
    return True


def _compile(needs: dict[Need, None]) -> None:
    """Compile kernels in threads. What goes wrong here goes wrong again at the launch, where it can be seen."""
    with (
        contextlib.suppress(Exception),
        ThreadPoolExecutor(min(THREADS, len(needs)), thread_name_prefix="trueup-compile") as threads,
        triton.AsyncCompileMode(threads),
    ):
        for kernel, types, constants, options, device in needs:
            with torch.cuda.device(device):
                kernel.warmup(*types, *constants, grid=(1, 1, 1), **dict(options))
