"""Compile the kernels of a forward pass at the same time, in threads.

Triton compiles a kernel at its first launch, in one to three seconds, most of which is spent outside Python. A model
needs five to fifteen kernels, so its first answer would take that many times as long. A first pass finds out which
ones: it leaves a site uncorrected if the site's kernel is not compiled yet. Then all of these kernels are compiled
together, and the pass runs again.

Only one thread at a time can run Python. So the kernels are translated from Python one after the other, those that take
longest to compile first; what follows runs at the same time for all of them.

The environment variable `TRUEUP_COMPILE_THREADS` sets the number of threads; with 0, each kernel is compiled at its
first launch.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from triton.compiler import ASTSource

from trueup.kernels.cuda.launch import Launch

Result = TypeVar("Result")


def threads_wanted() -> int:
    """Number of threads from the environment variable, or else one per core."""
    given, cores = os.environ.get("TRUEUP_COMPILE_THREADS", ""), os.cpu_count() or 1
    if given and not given.isdecimal():
        warnings.warn(
            f"TRUEUP_COMPILE_THREADS={given!r}: expected a number of threads, such as 8, or 0 to compile each kernel "
            f"at its first launch; trueup uses {cores}",
            stacklevel=2,
        )
    return int(given) if given.isdecimal() else cores


THREADS = threads_wanted()


class KernelSpec(NamedTuple):
    """A kernel with everything that determines its compiled code.

    `types` has a dtype for each tensor, whose address must be a multiple of 16, and an example of each number.
    """

    kernel: Any
    types: tuple[Any, ...]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    device: torch.device


def specs_of(launches: Mapping[Launch, tuple[Any, ...]], device: torch.device) -> list[KernelSpec]:
    """Specs of some launches, each with the `types` of its arguments; none unless the device is a GPU."""
    if device.type != "cuda":
        return []
    return [
        KernelSpec(launch.kernel, types, launch.constants, tuple(launch.options.items()), device)
        for launch, types in launches.items()
    ]


class _Pass(threading.local):
    """The forward pass of this thread: the kernels that it skipped, None outside a pass, and whether it can repeat."""

    missing: dict[KernelSpec, None] | None = None
    repeatable: Callable[[], bool]


_PASS = _Pass()
_COMPILED: set[KernelSpec] = set()
_ONE_CALLER = threading.Lock()


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
    """Return whether this pass skips the kernels of a plan, which are compiled after it.

    If not, their launches compile them, and `kernels` is emptied: the plan need not ask again.
    """
    missing = [kernel for kernel in kernels if kernel not in _COMPILED]  # another thread may empty `kernels`
    if missing and _PASS.missing is not None and not torch.cuda.is_current_stream_capturing() and _PASS.repeatable():
        _PASS.missing.update(dict.fromkeys(missing))
        return True
    _COMPILED.update(missing)
    kernels.clear()
    return False


def _compile(kernels: Iterable[KernelSpec]) -> None:
    """Compile and load kernels in threads. Errors are ignored here, because the launch raises them again."""
    with (
        _ONE_CALLER,  # the kernels of another caller are often the same
        contextlib.suppress(Exception),
        _translation_in_turn(),
        _Loader(THREADS, thread_name_prefix="trueup-compile") as threads,
        triton.AsyncCompileMode(threads),
    ):
        for kernel, types, constants, options, device in _longest_first(kernels):
            with torch.cuda.device(device):
                kernel.warmup(*types, *constants, grid=(1, 1, 1), **dict(options))


class _Loader(ThreadPoolExecutor):
    """Its threads compile a kernel, and load it on the device that was current when it was submitted."""

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(_compile_and_load, compile_kernel, torch.cuda.current_device())


def _compile_and_load(compile_kernel: Callable[[], Any], device: int) -> Any:
    compiled = compile_kernel()
    with torch.cuda.device(device):
        compiled[1, 1, 1]  # for any grid; some versions of Triton start the C compiler here
    return compiled


@contextlib.contextmanager
def _translation_in_turn() -> Iterator[None]:
    """Let threads translate kernels from Python one after the other: together, all would finish only at the end."""
    translate, turn = getattr(ASTSource, "make_ir", None), threading.Lock()
    if translate is None:  # in another version of Triton
        yield
        return

    def translate_in_turn(*arguments: Any, **named: Any) -> Any:
        with turn:
            return translate(*arguments, **named)

    ASTSource.make_ir = translate_in_turn
    try:
        yield
    finally:
        ASTSource.make_ir = translate


def _longest_first(kernels: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Sort kernels by how long they probably take: each flag adds code, and those of a model's last sites do most."""
    return sorted(kernels, key=lambda spec: sum(c is True for c in spec.constants))[::-1]
