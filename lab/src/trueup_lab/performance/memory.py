"""Memory of the C library, which decides how long a network takes on a CPU."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees. Return whether the C library can, which is glibc.

    By default glibc returns large blocks to the system and takes them again, page by page, at every operator. Whether
    it does so depends on what was allocated before: a ResNet-20 with 32 images took 10 ms, or 28 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
