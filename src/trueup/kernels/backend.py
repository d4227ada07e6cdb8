"""Find the backend that works for a kind of device on this machine: a compiled one, or else `plain`.

`dispatch` decides which backend a call takes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trueup.kernels import plain

COMPILERS = {"cpu": "numba", "cuda": "triton"}
# An installed compiler may not work: see `works`. Compiled graphs hold its operators all the same, which then compute
# with `plain`.
INSTALLED = {device: importlib.util.find_spec(name) is not None for device, name in COMPILERS.items()}
_NO_CONTEXT = contextlib.nullcontext()


@functools.cache
def fastest(name: str, device: str) -> Callable[..., Any]:
    """Return the function of this name from the compiled backend for a kind of device, or else from `plain`."""
    function: Callable[..., Any] = getattr(backend_for(device), name)
    return function


def works(device: str) -> bool:
    """Return whether a compiled backend works for a kind of device. If not, only functions of `plain` may be called.

    Not for code that torch.compile traces.
    """
    return backend_for(device) is not plain


@functools.cache
def backend_for(device: str) -> ModuleType:
    """Return the compiled backend for a kind of device; `plain` if it has none that works."""
    if not INSTALLED.get(device):
        return plain
    try:
        backend = importlib.import_module(f"trueup.kernels.{device}")
        if device == "cuda":
            backend.launch_nothing()
        return backend
    except Exception as error:  # a broken compiler must not fail a request
        warnings.warn(
            f"trueup computes in torch's own operators, which are slower: {COMPILERS[device]} does not work here "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return plain


def current_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the device of `x` the current one: Triton launches there."""
    if not x.is_cuda or torch._C._cuda_getDevice() == x.get_device():  # `torch.cuda.current_device` checks much first
        return _NO_CONTEXT
    return torch.cuda.device(x.get_device())
