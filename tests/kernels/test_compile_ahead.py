"""Compiling kernels in threads, with a stand-in for Triton's kernels."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from trueup.kernels.cuda import compile_ahead
from trueup.kernels.cuda.launch import Launch

CUDA = torch.device("cuda")


class Kernel:
    """Counts what it is asked to compile, and where."""

    cache_key = "of its source"

    def __init__(self, error=None):
        self.error, self.compiled, self.launched = error, [], []

    def warmup(self, *arguments, grid, **options):
        self.compiled.append((arguments, grid, options, threading.current_thread().name))
        if self.error is not None:
            raise self.error

    def __getitem__(self, grid):
        return lambda *arguments, **_: self.launched.append((grid, arguments))


@pytest.fixture(autouse=True)
def several_cores(monkeypatch):
    monkeypatch.setattr(compile_ahead, "THREADS", 3)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    yield
    compile_ahead.start_compiling.cache_clear()


def start(kernel, device=CUDA, add=False):
    return compile_ahead.start_compiling(kernel, (torch.float32, 2), (64, add), (("num_warps", 2),), device)


def test_a_kernel_is_compiled_once_in_a_thread_of_its_own():
    kernel = Kernel()
    futures = [start(kernel), start(kernel), start(kernel, add=True)]
    for future in futures:
        future.result()
    assert futures[0] is futures[1] is not futures[2]
    assert {arguments for arguments, *_ in kernel.compiled} == {(torch.float32, 2, 64, a) for a in (False, True)}
    assert len(kernel.compiled) == 2
    assert all(options == {"num_warps": 2} for _, _, options, _ in kernel.compiled)
    assert all(name.startswith("trueup-compile") for *_, name in kernel.compiled)


def test_on_a_cpu_or_with_one_core_nothing_is_started(monkeypatch):
    kernel = Kernel()
    assert start(kernel, torch.device("cpu")) is None
    monkeypatch.setattr(compile_ahead, "THREADS", 1)
    assert start(kernel) is None
    assert kernel.compiled == []


def test_a_launch_waits_for_its_kernel_and_does_without_it_if_that_failed():
    kernel = Kernel(RuntimeError("no compiler"))
    launch = Launch(kernel, (5, 1, 1), (64, False), num_warps=2)
    launch.compiling = start(kernel)
    launch(7, 8)
    assert launch.compiling.done()
    assert kernel.launched == [((5, 1, 1), (7, 8, 64, False))]
