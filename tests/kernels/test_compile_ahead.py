"""Compiling the kernels of a pass together, with stand-ins for Triton's kernels and for a forward pass."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time

import pytest
import torch
from triton.compiler import ASTSource

from trueup.kernels.cuda import compile_ahead, maps
from trueup.kernels.cuda.compile_ahead import KernelSpec, compile_together, skip_uncompiled

CUDA = torch.device("cuda")


class Kernel:
    """Counts what it is asked to compile and load, and by which thread, as Triton's compiler would."""

    def __init__(self, error=None):
        self.error, self.compiled, self.loaded = error, [], []

    def warmup(self, *arguments, grid, **options):
        def compile_kernel():
            ASTSource.make_ir(self)
            self.compiled.append((arguments, grid, options, threading.current_thread().name))
            if self.error is not None:
                raise self.error
            return self

        Executor.active.submit(compile_kernel)

    def __getitem__(self, grid):
        self.loaded.append((threading.current_thread().name, torch.cuda.current_device()))


class Executor:
    """Stands for `triton.AsyncCompileMode`, and raises what went wrong at its end."""

    active = None

    def __init__(self, threads):
        self.threads, self.futures = threads, []

    def submit(self, function):
        self.futures.append(self.threads.submit(function))

    def __enter__(self):
        Executor.active = self

    def __exit__(self, *_):
        for future in self.futures:
            future.result()


@pytest.fixture(autouse=True)
def several_cores(monkeypatch):
    monkeypatch.setattr(compile_ahead, "THREADS", 3)
    monkeypatch.setattr(compile_ahead, "_COMPILED", set())
    monkeypatch.setattr(compile_ahead.triton, "AsyncCompileMode", Executor)
    monkeypatch.setattr(ASTSource, "make_ir", lambda _: None)
    here = threading.local()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(here, "device", 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: use(here, device))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@contextlib.contextmanager
def use(here, device):
    """Stands for `torch.cuda.device`: makes a device the current one of this thread."""
    before, here.device = getattr(here, "device", 0), getattr(device, "index", device)
    yield
    here.device = before


def need(kernel, add=False, device=CUDA):
    return KernelSpec(kernel, (torch.float32, 2), (64, add), (("num_warps", 2),), device)


def a_pass(*sites):
    """A forward pass with a list of needed kernels per site; it returns at which sites it did without."""
    return lambda: [skip_uncompiled(needs) for needs in sites]


def test_a_pass_is_repeated_when_all_that_it_needs_has_been_compiled_in_threads():
    kernel = Kernel()
    sites = [[need(kernel)], [need(kernel, add=True), need(kernel)]]
    calls = []

    def run():
        calls.append(a_pass(*sites)())
        return calls[-1]

    assert compile_together(run, lambda: True) == [False, False]
    assert calls == [[True, True], [False, False]]
    assert sorted(arguments for arguments, *_ in kernel.compiled) == [(torch.float32, 2, 64, a) for a in (False, True)]
    assert all(options == {"num_warps": 2} for _, _, options, _ in kernel.compiled)
    assert all(name.startswith("trueup-compile") for *_, name in kernel.compiled)
    assert compile_together(run, lambda: True) == [False, False]
    assert len(calls) == 3  # nothing is missing any more


def test_another_pass_with_the_same_kernels_is_not_repeated():
    kernel, calls = Kernel(), []
    compile_together(a_pass([need(kernel)]), lambda: True)
    compile_together(lambda: calls.append(a_pass([need(kernel)])()), lambda: True)
    assert calls == [[False]]


@pytest.mark.parametrize("reason", ["hooks", "one thread", "a CUDA graph", "outside of a pass"])
def test_what_cannot_be_repeated_compiles_when_it_is_needed(monkeypatch, reason):
    kernel, calls = Kernel(), []
    if reason == "one thread":
        monkeypatch.setattr(compile_ahead, "THREADS", 1)
    if reason == "a CUDA graph":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run = a_pass([need(kernel)])
    if reason == "outside of a pass":
        calls.append(run())
    else:
        compile_together(lambda: calls.append(run()), lambda: reason != "hooks")
    assert calls == [[False]]
    assert kernel.compiled == []


def test_a_kernel_that_does_not_compile_is_left_to_its_launch():
    kernel, calls = Kernel(RuntimeError("no compiler")), []
    compile_together(lambda: calls.append(a_pass([need(kernel)])()), lambda: True)
    assert calls == [[True], [False]]


def test_kernels_are_loaded_by_the_threads_on_their_device():
    kernel = Kernel()
    compile_together(a_pass([need(kernel, device=torch.device("cuda", 1))]), lambda: True)
    (thread, device) = kernel.loaded[0]
    assert thread.startswith("trueup-compile")
    assert device == 1


def test_a_kernel_that_does_not_load_is_left_to_its_launch(monkeypatch):
    kernel, calls = Kernel(), []
    monkeypatch.setattr(Kernel, "__getitem__", lambda *_: 1 / 0)
    compile_together(lambda: calls.append(a_pass([need(kernel)])()), lambda: True)
    assert calls == [[True], [False]]


def test_kernels_are_translated_one_at_a_time_and_the_longest_first(monkeypatch):
    running, order = [], []

    def translate(kernel):
        running.append(kernel)
        time.sleep(0.02)
        order.append((kernel, len(running)))
        running.remove(kernel)

    monkeypatch.setattr(ASTSource, "make_ir", translate)
    short, late, long = Kernel(), Kernel(), Kernel()
    compile_together(a_pass([need(short), need(long, add=True)], [need(late)]), lambda: True)
    assert order == [(long, 1), (late, 1), (short, 1)]
    assert ASTSource.make_ir is translate  # Triton is as it was


def test_a_second_caller_compiles_when_the_first_has_finished(monkeypatch):
    began, running, most = threading.Barrier(2), [], []

    def translate(kernel):
        running.append(kernel)
        time.sleep(0.02)
        most.append(len(running))
        running.remove(kernel)

    def call():
        def run():
            if not skip_uncompiled(needs):
                return
            began.wait()

        needs = [need(Kernel())]
        compile_together(run, lambda: True)

    monkeypatch.setattr(ASTSource, "make_ir", translate)
    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert most == [1, 1]
    assert ASTSource.make_ir is translate


def test_an_error_of_the_model_leaves_no_pass_behind():
    with pytest.raises(ZeroDivisionError):
        compile_together(lambda: 1 / 0, lambda: True)
    assert not skip_uncompiled([need(Kernel())])


def test_threads_do_not_see_each_others_passes():
    found = []

    def run():
        other = threading.Thread(target=lambda: found.append(skip_uncompiled([need(Kernel())])))
        other.start()
        other.join()

    compile_together(run, lambda: True)
    assert found == [False]


@pytest.mark.parametrize("add", [None, False, True])  # None: maps are only measured
@pytest.mark.parametrize("side", [7, 112])  # one kernel, and two
def test_what_is_compiled_ahead_has_the_types_of_the_launch(monkeypatch, add, side):
    monkeypatch.setattr(maps, "processors", lambda _device: 132)
    monkeypatch.setattr(maps, "starts_early", lambda *_: False)
    half, wide = torch.bfloat16, torch.float32
    dtypes = () if add is None else (wide, half, half, wide, wide)
    division = (None, None, None)
    plan = maps._plan.__wrapped__(
        torch.Size((64, 32, side, side)), (32 * side**2, 1, 32 * side, 32), 1, half, CUDA, True, add, dtypes, *division
    )
    assert len(plan.missing) == (2 if plan.split else 1) == (1 if side == 7 else 2)
    tensors = {"x": half, "residual": half, "out": half, "norm_mean": half, "norm_variance": half}
    tensors |= dict.fromkeys(("sums", "found", "reference", "gates", "norm_weight", "norm_bias"), wide)
    for needed in plan.missing:
        names = list(inspect.signature(needed.kernel.fn).parameters)
        assert len(names) == len(needed.types) + len(needed.constants)
        for name, kind in zip(names, needed.types, strict=False):
            assert kind == tensors[name] if name in tensors else isinstance(kind, (int, float)), name


def test_a_pass_that_skips_a_kernel_is_repeated_even_if_another_thread_launches_it_meanwhile():
    needs, calls = [need(Kernel())], []

    def launched_elsewhere():
        other = threading.Thread(target=skip_uncompiled, args=(needs,))
        other.start()
        other.join()
        return True

    compile_together(lambda: calls.append(skip_uncompiled(needs)), launched_elsewhere)
    assert calls == [True, False]


@pytest.mark.parametrize(("given", "threads"), [("3", 3), ("0", 0), ("", os.cpu_count())])
def test_the_environment_sets_the_number_of_threads(monkeypatch, given, threads):
    monkeypatch.setenv("TRUEUP_COMPILE_THREADS", given)
    assert compile_ahead.threads_wanted() == threads


def test_a_number_of_threads_that_is_none_is_a_warning(monkeypatch):
    monkeypatch.setenv("TRUEUP_COMPILE_THREADS", "auto")
    with pytest.warns(UserWarning, match=r"TRUEUP_COMPILE_THREADS='auto': expected a number"):
        assert compile_ahead.threads_wanted() == os.cpu_count()
