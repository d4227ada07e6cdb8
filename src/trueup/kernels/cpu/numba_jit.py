"""Compile functions with numba: without Python's lock, and cached on disk where possible."""

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from trueup.kernels.cpu.filled_cache import FilledCache, filled_caches, loaded_callback


def njit(function: Any = None, **options: Any) -> Any:
    """Compile a function, or load it from a cache. Where nothing can be saved, it is compiled once per process."""
    if function is None:
        return lambda inner: njit(inner, **options)
    if options.get("inline") == "always":  # becomes part of its callers
        return numba.njit(function, **options)
    try:
        compiled = numba.njit(function, nogil=True, cache=True, **options)
    except RuntimeError:  # "cannot cache function: no locator available"
        compiled = numba.njit(function, nogil=True, **options)
    if hasattr(compiled, "_cache"):
        compiled._cache = FilledCache(filled_caches(function), compiled._cache)
    return compiled


def callback(function: Any) -> int:
    """Address of a compiled C function that takes the address of an array of int64."""
    signature = types.void(types.CPointer(types.int64))
    compiled = loaded_callback(function, signature)
    if compiled is None:
        try:
            compiled = numba.cfunc(signature, cache=True)(function)
        except RuntimeError:
            compiled = numba.cfunc(signature)(function)
    _KEPT.append(compiled)
    address: int | None = compiled.address
    assert address is not None
    return address


_KEPT: list[Any] = []  # the code of a callback lives as long as its object


@intrinsic
def _at_address(_context: Any, _address: Any) -> Any:
    """Convert an address to a pointer, which `numba.carray` takes."""

    def code(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), code


@intrinsic
def _fetch_add(_context: Any, _pointer: Any, _value: Any) -> Any:
    """Add to the first int64 at a pointer and return what was there, as one step that threads cannot divide."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], arguments[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), code


at_address: Any = _at_address
fetch_add: Any = _fetch_add
