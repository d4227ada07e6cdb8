"""A correction may write over the output of a convolution: only where nobody can see that output."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import trueup
from architectures import images, make
from graph.chains import Block, Shared, apart, dark
from trueup.kernels import dispatch

RULE = trueup.Evidence(budget=1, strength=0.2)
SEEN = dark(2)


class Same(nn.Module):
    """A convolution that keeps the shape of the images, a norm, and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()
        self.eval()

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


def corrected(model, rule=RULE, **options):
    return trueup.correct(model, trueup.calibrate(model, [images(24)], decide=False), rule, **options)


@pytest.fixture
def overwritten(monkeypatch):
    """Run a corrected model and return for how many sites the result was written over the input."""
    taken, real = [], dispatch.compute_realign

    def noted(*arguments, overwrite=False):
        out = real(*arguments, overwrite=overwrite)
        taken.append(out.data_ptr() == arguments[0].data_ptr())
        return out

    monkeypatch.setattr(dispatch, "compute_realign", noted)

    def run(robust, x):
        taken.clear()
        with torch.inference_mode():
            robust(x)
        return sum(taken)

    return run


@pytest.mark.parametrize(("name", "sites"), [("resnet", 3), ("mobilenet", 3)])
def test_most_corrections_need_no_memory_of_their_own(overwritten, name, sites):
    robust = corrected(make(name))
    assert overwritten(robust, dark(4)) >= sites
    assert overwritten(apart(robust), dark(4)) == 0


@pytest.mark.parametrize(
    ("how", "count"),
    [
        pytest.param(lambda self, y: self.bn(y), 1, id="plain"),
        pytest.param(lambda self, y: self.bn(y).relu(), 1, id="with a relu"),
        pytest.param(lambda self, y: self.bn(y) + y, 0, id="it is the residual"),
        pytest.param(lambda self, y: self.bn(y) * y.mean(), 0, id="read later"),
        pytest.param(lambda self, y: self.bn(y.relu()), 0, id="not the convolution's own"),
        pytest.param(lambda self, y: self.bn(y.view(y.shape)), 0, id="a view"),
        pytest.param(lambda self, y: self.bn(F.conv2d(y, self.head.weight.new_ones(4, 4, 1, 1))), 0, id="a function"),
    ],
)
def test_only_the_output_of_a_convolution_that_nothing_else_reads_is_overwritten(overwritten, how, count):
    robust = corrected(Shared(how))
    assert overwritten(robust, dark(4)) == count
    with torch.inference_mode():
        assert robust(dark(4)).equal(apart(robust)(dark(4)))


def test_an_input_of_the_model_is_left(overwritten):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1)).eval()
    robust, x = corrected(model), dark(4)
    before = x.clone()
    assert overwritten(robust, x) == 0
    assert x.equal(before)


class Recorder(TorchDispatchMode):
    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.convolution.default, torch.ops.aten.conv2d.default):
            self.kept.append(out)
        return out


class Listener(TorchFunctionMode):
    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.conv2d:
            self.kept.append(out)
        return out


def keep(kept, kind=nn.Module):
    """A hook that keeps a module's output, or, before it, its input."""

    def hook(module, given, *out):
        if isinstance(module, kind):
            kept.append(out[0] if out else given[0])

    return hook


def with_own_forward(robust, kept):
    conv = robust.model.conv

    def forward(x):
        kept.append(type(conv).forward(conv, x))
        return kept[-1]

    conv.forward = forward
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    "watch",
    [
        pytest.param(lambda r, kept: r.model.conv.register_forward_hook(keep(kept)), id="a hook"),
        pytest.param(lambda r, kept: r.placed[0].register_forward_pre_hook(keep(kept)), id="a hook before the site"),
        pytest.param(
            lambda r, kept: r.placed[0].register_forward_hook(lambda _m, given, _o: kept.append(given[0])),
            id="a hook at the site",
        ),
        pytest.param(lambda r, kept: r.model.bn.register_forward_pre_hook(keep(kept)), id="a hook before the norm"),
        pytest.param(lambda _, kept: register_module_forward_hook(keep(kept, nn.Conv2d)), id="a hook on all modules"),
        pytest.param(
            lambda r, kept: register_module_forward_pre_hook(keep(kept, type(r.placed[0]))),
            id="a hook before all modules",
        ),
        pytest.param(lambda _, kept: Listener(kept), id="a function mode"),
        pytest.param(lambda _, kept: Recorder(kept), id="a dispatch mode"),
        pytest.param(with_own_forward, id="a forward of its own"),
    ],
)
def test_what_looks_at_a_convolution_later_sees_its_output(overwritten, watch):
    robust, kept = corrected(Same()), []
    assert overwritten(robust, SEEN) == 1
    with torch.inference_mode():
        wanted = robust.model.conv(SEEN)
        with watch(robust, kept):
            robust(SEEN)
    assert len(kept) == 1
    assert kept[0].equal(wanted)


def test_a_module_that_returns_its_input_may_replace_a_convolution(overwritten):
    robust, x = corrected(Same()), SEEN.clone()
    robust.model.conv = nn.Identity()
    assert overwritten(robust, x) == 0
    assert x.equal(SEEN)


def test_who_runs_a_recorded_graph_may_keep_any_value():
    class Keeper(fx.Interpreter):
        def run_node(self, node):
            self.kept = {**getattr(self, "kept", {}), str(node.target): super().run_node(node)}
            return self.kept[str(node.target)]

    robust = corrected(Same())
    with torch.inference_mode():
        keeper = Keeper(fx.symbolic_trace(robust))
        assert keeper.run(SEEN).equal(robust(SEEN))
        (found,) = (value for name, value in keeper.kept.items() if name.endswith("conv") and isinstance(value, Tensor))
        assert found.equal(robust.model.conv(SEEN))


def test_what_a_hook_at_a_fused_norm_keeps_is_left():
    """With a hook, the norm runs as a module again: its output is not the convolution's."""
    robust, kept = corrected(Same()), []
    robust.model.bn.register_forward_hook(keep(kept))
    with torch.inference_mode():
        robust(SEEN)
        assert kept[0].equal(robust.model.bn(robust.model.conv(SEEN)))


def test_a_convolution_may_be_called_twice_and_a_norm_too(overwritten):
    class Twice(Same):
        def forward(self, x):
            return self.bn(self.conv(self.bn(self.conv(x)).relu())) + self.conv(x)

    robust = corrected(Twice())
    assert overwritten(robust, SEEN) == 2
    with torch.inference_mode():
        assert robust(SEEN).equal(apart(robust)(SEEN))


@pytest.mark.parametrize("rule", [RULE, trueup.Evidence(budget=0.05, strength=0.2, least=0)], ids=["all", "gated"])
def test_gates_and_reports_read_before_anything_is_overwritten(rule):
    robust = corrected(make("resnet"), rule, report="all")
    twin, x = apart(robust), torch.cat([images(2), dark(2)])
    with torch.inference_mode():
        (out, report), (wanted, told) = robust(x), twin(x)
    assert out.equal(wanted)
    assert all(report[name].equal(told[name]) for name in told)


def test_nothing_is_overwritten_with_gradients_or_in_a_watched_model(overwritten):
    class Untraceable(Same):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else x + 0)

    robust, kept = corrected(Same()), []
    robust.model.conv.register_forward_hook(keep(kept))
    x = SEEN.clone().requires_grad_()
    robust(x).sum().backward()
    assert kept[0].equal(robust.model.conv(x))
    watched = corrected(Untraceable())
    assert not watched.sites.traced
    assert overwritten(watched, SEEN) == 0


def test_a_subclass_of_a_convolution_may_keep_what_it_returns(overwritten):
    kept = []

    class Keeping(nn.Conv2d):
        def forward(self, x):
            kept[:] = [super().forward(x)]
            return kept[0]

    model = Block(lambda self, y, x: self.relu(y))
    model.conv = Keeping(3, 4, 3).eval()
    targets = trueup.calibrate(model, [images(24)], decide=False, leaves=(Keeping,))
    robust = trueup.correct(model, targets, RULE, leaves=(Keeping,))
    assert overwritten(robust, SEEN) == 0
    assert kept[0].equal(F.conv2d(SEEN, model.conv.weight, model.conv.bias))
