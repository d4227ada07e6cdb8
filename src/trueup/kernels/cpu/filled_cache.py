"""Load compiled functions from a folder that cannot be written, as in a read-only container.

numba uses a cache only where it can also save, so it ignores one that was filled when an image was built. What is used
of numba here is not part of its documented interface: if it changes, functions are cached as numba does by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any


class FilledCache:
    """A cache of numba's, and the folders that it skipped because they cannot be written: they are read first.

    What cannot be loaded is compiled again.
    """

    def __init__(self, filled: Sequence[Any], own: Any) -> None:
        self.filled, self.own = filled, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Return the code for a signature, or None if no cache holds it."""
        for cache in self.filled:
            with contextlib.suppress(Exception):  # a folder that cannot be read, an index of another version
                if (found := cache.load_overload(signature, context)) is not None:
                    return found
        try:
            return self.own.load_overload(signature, context)
        except Exception:  # what another version of trueup saved may name classes that are gone
            with contextlib.suppress(Exception):
                self.own.flush()
            return None


def filled_caches(function: Callable[..., Any]) -> list[Any]:
    """Caches of a function in folders that numba would take, if it could write there, before the one that it takes."""
    found: list[Any] = []
    with contextlib.suppress(Exception):
        if not getattr(_part_of_numba("config"), "CACHE_LOCATOR_CLASSES", ""):  # chosen by the user
            path = inspect.getfile(function)
            for kind in _part_of_numba("caching").CacheImpl._locator_classes:
                if kind.from_function(function, path) is not None:
                    break  # it can be written: numba takes it
                with contextlib.suppress(Exception):  # a kind that is not for this function
                    locator = kind(function, path)
                    if os.path.isabs(locator.get_cache_path()) and os.path.isdir(locator.get_cache_path()):
                        found.append(_cache_at(locator, function))
    return found


def loaded_callback(function: Callable[..., Any], signature: Any) -> Any:
    """Load a compiled C function from such a folder; None if there is none. `numba.cfunc` compiles at once."""
    with contextlib.suppress(Exception):
        if filled := filled_caches(function):
            compiled = _part_of_numba("ccallback").CFunc(
                function, (signature.args, signature.return_type), locals={}, options={}
            )
            compiled._cache = FilledCache(filled, compiled._cache)
            compiled.compile()
            return compiled
    return None


def _cache_at(locator: Any, function: Callable[..., Any]) -> Any:
    class Given:
        @staticmethod
        def from_function(*_: Any) -> Any:
            return locator

    caching = _part_of_numba("caching")
    implementation = type("Implementation", (caching.CompileResultCacheImpl,), {"_locator_classes": [Given]})
    return type("Cache", (caching.FunctionCache,), {"_impl_class": implementation})(function)


def _part_of_numba(name: str) -> Any:
    return importlib.import_module(f"numba.core.{name}")
