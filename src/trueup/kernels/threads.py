"""Compiled code side by side: in the threads that torch computes with where they can be had, else in Python's.

Torch's threads do not sleep between two operators but wait for work, a core each. Threads beside them would get half
of those cores, and be no faster than none.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_BEGIN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def share(work: Callable[[int], None], shares: int) -> None:
    """Do `work(0)`, `work(1)`, ... side by side. What is raised by one of them is raised here."""
    if shares == 1:
        work(0)
    elif (openmp := _torchs_openmp()) is not None:
        _share_by(openmp, work, shares)
    else:
        others = [_pool(os.getpid(), shares - 1).submit(work, k) for k in range(1, shares)]
        work(0)
        for other in others:
            other.result()


def _share_by(openmp: ctypes.CDLL, work: Callable[[int], None], shares: int) -> None:
    failures: list[BaseException] = []

    def begin(_: object) -> None:
        try:  # there may be fewer threads than shares
            for k in range(openmp.omp_get_thread_num(), shares, openmp.omp_get_num_threads()):
                work(k)
        except BaseException as error:  # nothing can be raised through C
            failures.append(error)

    openmp.GOMP_parallel(_BEGIN(begin), None, shares, 0)
    if failures:
        raise failures[0]


@functools.cache
def _torchs_openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP, if that is what torch came with and has loaded, as on Linux."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*")):
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
        except OSError:
            continue
    return None


@functools.lru_cache(maxsize=1)
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="trueup")
