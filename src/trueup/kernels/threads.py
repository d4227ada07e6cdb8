"""Compiled code side by side, in threads that sleep in between."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def share(work: Callable[[int], None], shares: int) -> None:
    """Do `work(0)`, `work(1)`, ... side by side."""
    if shares == 1:
        work(0)
        return
    others = [_pool(os.getpid(), shares - 1).submit(work, k) for k in range(1, shares)]
    work(0)
    for other in others:
        other.result()


@functools.lru_cache(maxsize=1)
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="trueup")
