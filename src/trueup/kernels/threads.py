"""Run work in parallel: in torch's own OpenMP threads if they can be reached, else in Python threads.

Torch's threads spin between two operators, each on a core of its own. Other threads would compete with them for those
cores and gain nothing.
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


def run_parallel(work: Callable[[int], None], shares: int) -> None:
    """Run `work(0)` to `work(shares - 1)` in parallel. An exception in one of them is raised here."""
    if shares == 1:
        work(0)
    elif (openmp := _torch_openmp()) is not None:
        _run_in_openmp(openmp, work, shares)
    else:
        others = [_pool(os.getpid(), shares - 1).submit(work, k) for k in range(1, shares)]
        work(0)
        for other in others:
            other.result()


def run_native(function: int, job: ctypes.Array[ctypes.c_int64], shares: int) -> None:
    """Call the compiled function at an address in `shares` threads at once, each with the same `job`.

    The threads divide the work among themselves, and none of them runs Python.
    """
    if shares == 1:
        _native(function)(job)
    elif (openmp := _torch_openmp()) is not None:
        openmp.GOMP_parallel(ctypes.c_void_p(function), job, shares, 0)
    else:
        run_parallel(lambda _: _native(function)(job), shares)


@functools.cache
def _native(function: int) -> Callable[[ctypes.Array[ctypes.c_int64]], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)


def _run_in_openmp(openmp: ctypes.CDLL, work: Callable[[int], None], shares: int) -> None:
    failures: list[BaseException] = []

    def begin(_: object) -> None:
        try:
            # There may be fewer threads than shares.
            for k in range(openmp.omp_get_thread_num(), shares, openmp.omp_get_num_threads()):
                work(k)
        except BaseException as error:  # exceptions cannot pass through C
            failures.append(error)

    openmp.GOMP_parallel(_BEGIN(begin), None, shares, 0)
    if failures:
        raise failures[0]


@functools.cache
def _torch_openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP, if torch was built with it and has loaded it, as on Linux."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*")):
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
        except OSError:
            continue
    return None


@functools.lru_cache(maxsize=1)
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    """Thread pool of this process; a forked process does not inherit its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="trueup")
