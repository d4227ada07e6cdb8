"""Calls that skip torch's dispatcher: only where nothing has to see the operator."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from trueup import kernels
from trueup.kernels.eager import is_plain_eager


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_nothing_watches_plain_inference(mode):
    with mode():
        assert is_plain_eager(torch.zeros(2), None, torch.zeros(2))


def under_a_mode(look, a):
    with Recorder():
        look(a)


def with_forward_derivatives(look, a):
    with forward_ad.dual_level():
        look(a)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(torch.enable_grad()(lambda look, a: look(a)), id="gradients"),
        under_a_mode,
        with_forward_derivatives,
        pytest.param(lambda look, a: vmap(look)(a), id="transform"),
        pytest.param(lambda look, a: torch.jit.trace(look, a, check_trace=False), id="tracer"),
        pytest.param(lambda look, a: torch.compile(look, backend="eager", fullgraph=True)(a), id="compiler"),
        pytest.param(lambda look, a: look(torch.nn.Parameter(a)), id="subclass"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its tracer
def test_what_watches_is_noticed(call):
    seen = []

    def look(x):
        seen.append(is_plain_eager(x))
        return x * 1

    with torch.no_grad():
        call(look, torch.zeros(2, 2))
    assert seen
    assert not any(seen)


def test_a_mode_sees_the_operators():
    x, levels = torch.randn(2, 4, 9, 9), torch.linspace(0, 1, 5)
    curve = kernels.curve_of(levels)
    with torch.no_grad(), Recorder() as recorder:
        kernels.correct(x, curve, 0.5, location="keep", sparse=False)
        kernels.moments(x, bands=True)
    assert {"trueup::transport", "trueup::moments"} <= set(recorder.seen)


def test_the_result_is_the_same_either_way():
    x, curve = torch.randn(2, 4, 9, 9), kernels.curve_of(torch.linspace(0, 1, 5))
    through = kernels.correct(x, curve, 0.5, location="keep", sparse=False), kernels.moments(x, bands=True)
    with torch.no_grad():
        direct = kernels.correct(x, curve, 0.5, location="keep", sparse=False), kernels.moments(x, bands=True)
    assert all(a.equal(b) for a, b in zip(through, direct, strict=True))
