"""What leads to a relu in one pass with the paper's rule: a batch norm, or its sum with something; nowhere else."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from architectures import images, make
from one_pass import (
    FIRST,
    INTO,
    LAST,
    Block,
    apart,
    dark,
    iadd,
    iadd_to_the_other,
    norm_is_read,
    residual_is_overwritten,
    sum_is_read,
)

PAPER = trueup.Correction(1, 0.2)
SORT = trueup.Correction(1, 0.2, method="sort")


@pytest.fixture(params=[False, True], ids=["torch's norm", "folded"])
def norms_are_folded(request, monkeypatch):
    """As on a GPU, where it is one operator; elsewhere a norm is done first, by torch."""
    if request.param:
        monkeypatch.setattr(sys.modules["trueup.kernels.operator"], "_takes_norms", lambda _: True)


def corrected(model, rule=PAPER, **options):
    model = model.eval()
    targets = trueup.calibrate(model, images(24).split(12), **options)
    return trueup.correct(model, targets, rule, select=lambda site: site.kind == "activation", **options)


def led(robust):
    """For each site, what the module placed there is told to do."""
    robust, seen = copy.deepcopy(robust), {}

    def note(name):
        def hook(_module, _inputs, given, _output):
            told = ("norm" in given, given.get("order"), given.get("activation"))
            seen[name] = tuple("norm" if part is True else part for part in told if part)

        return hook

    for name, module in zip(robust.sites, robust.placed, strict=True):
        module.register_forward_hook(note(name), with_kwargs=True)
    robust(dark(2))
    return seen


def overwritten_before_the_sum(self, y, x):
    r = self.other(x)
    r.mul_(3)
    return F.relu(y + r)


class Unit(nn.Module):
    """An activation of one's own."""

    trueup_site = True

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=-0.1)


LEADS = {
    "norm": (lambda self, y, x: self.relu(y), None, ("norm", "relu")),
    "norm, in place": (lambda self, y, x: self.relu(y), nn.ReLU(inplace=True), ("norm", "relu")),
    "function": (lambda self, y, x: F.relu(y), None, ("norm", "relu")),
    "method": (lambda self, y, x: y.relu_(), None, ("norm", "relu")),
    "sum": (lambda self, y, x: self.relu(y + self.other(x)), None, ("norm", FIRST, "relu")),
    "residual first": (lambda self, y, x: (self.other(x) + y).relu(), None, ("norm", LAST, "relu")),
    "sum in place": (iadd, nn.ReLU(inplace=True), ("norm", INTO, "relu")),
    "torch.add": (lambda self, y, x: torch.add(y, self.other(x)).relu(), None, ("norm", FIRST, "relu")),
    "a number": (lambda self, y, x: F.relu(y + x.shape[1]), None, ("norm", FIRST, "relu")),
    "to be broadcast": (lambda self, y, x: F.relu(y + x[:, :1, 2:, 2:]), None, ("norm", FIRST, "relu")),
    "the same for all images": (lambda self, y, x: F.relu(y + self.bias), None, ("relu",)),
    "double": (lambda self, y, x: F.relu(y + self.other(x).double()).float(), None, ("norm", FIRST, "relu")),
    "in place, double": (lambda self, y, x: y.add_(self.other(x).double()).relu_(), None, ("norm", INTO, "relu")),
    "another layout": (
        lambda self, y, x: F.relu(self.other(x).to(memory_format=torch.channels_last) + y),
        None,
        ("norm", LAST, "relu"),
    ),
    "an overwritten residual": (residual_is_overwritten, None, ("norm", FIRST, "relu")),
    "overwritten before the sum": (overwritten_before_the_sum, None, (FIRST, "relu")),
    "sum in place into the other": (iadd_to_the_other, None, ("relu",)),
    "sum of others": (lambda self, y, x: F.relu(self.other(x) + 1) + y, None, ("relu",)),
    "alpha": (lambda self, y, x: torch.add(y, self.other(x), alpha=0.5).relu(), None, ("relu",)),
    "a sum that is read": (sum_is_read, None, ("relu",)),
    "a norm that is read": (norm_is_read, None, ("relu",)),
    "a norm that is read beside": (lambda self, y, x: F.relu(y) + y, None, ("relu",)),
    "a sum with itself": (lambda self, y, x: F.relu(y + y), None, ("relu",)),
    "another activation": (lambda self, y, x: self.relu(y), nn.ReLU6(), ()),
    "another, then a sum": (lambda self, y, x: F.silu(y) + self.other(x), None, ()),
    "another, then a sum and a view": (lambda self, y, x: (F.gelu(y) + self.other(x)).flatten(2)[..., None], None, ()),
    "a relu, then a sum": (lambda self, y, x: F.relu(y) + self.other(x), None, ("norm", "relu")),
    "a unit of one's own, then a sum": (lambda self, y, x: self.relu(y) + self.other(x), Unit(), ()),
    "a view in between": (lambda self, y, x: y.flatten(2).relu().view(y.shape), None, ("relu",)),
}


@pytest.mark.usefixtures("norms_are_folded")
@pytest.mark.parametrize(("follow", "relu", "wanted"), LEADS.values(), ids=LEADS.keys())
def test_what_leads_to_a_relu_is_done_in_the_same_pass_and_nothing_changes(follow, relu, wanted):
    model = Block(follow, relu)
    robust = corrected(model)
    assert list(led(robust).values()) == [wanted]
    assert list(led(apart(robust)).values()) == [()]
    x = torch.cat([images(4), dark(4)])
    with torch.no_grad():
        out = robust(x)
        assert out.equal(apart(robust)(x))
        assert out.stride() == apart(robust)(x).stride()
        assert not out.equal(model(x))
        assert copy.deepcopy(robust)(x).equal(out)
    assert list(led(corrected(model, SORT)).values()) == [()]


@pytest.mark.usefixtures("norms_are_folded")
@pytest.mark.parametrize("name", ["mobilenet", "densenet", "vgg", "resnet", "convnext"])
def test_on_every_architecture_nothing_changes(name):
    model = make(name)
    robust = corrected(model)
    assert any("norm" in told for told in led(robust).values()) == (name in ("densenet", "resnet"))
    for x in (images(4), dark(4)):
        with torch.no_grad():
            assert robust(x).equal(apart(robust)(x))
            batch = robust(x.to(memory_format=torch.channels_last))
            torch.testing.assert_close(batch, robust(x), atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("norms_are_folded")
def test_gradients_are_the_same():
    robust = corrected(Block(iadd))
    found = []
    for module in (robust, apart(robust)):
        x = dark(4).requires_grad_()
        weights = list(module.model.parameters())
        found.append(torch.autograd.grad(module(x).square().sum(), [x, *weights]))
    for ours, theirs in zip(*found, strict=True):
        assert ours.equal(theirs)


@pytest.mark.usefixtures("norms_are_folded")
def test_a_norm_that_changed_since_is_the_models():
    robust = corrected(Block(iadd))
    with torch.no_grad():
        before = robust(dark())
        robust.model.bn.running_mean += 1
        assert not robust(dark()).equal(before)
        assert robust(dark()).equal(apart(robust)(dark()))
        calls = []
        robust.model.bn.register_forward_hook(lambda *_: calls.append("bn"))
        robust(dark())
        assert calls == ["bn"]


@pytest.mark.usefixtures("norms_are_folded")
def test_compiled_and_exported():
    robust, x = corrected(Block(iadd)), torch.cat([images(4), dark(4)])
    with torch.no_grad():
        wanted = robust(x)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(robust, fullgraph=True)(x), wanted, atol=1e-4, rtol=1e-4)
        exported = torch.export.export(robust, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
        torch.testing.assert_close(exported(x[:5]), wanted[:5], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("norms_are_folded")
def test_in_another_precision(dtype):
    model = Block(iadd).eval()
    targets = trueup.calibrate(model, [images(24)])
    robust = trueup.correct(copy.deepcopy(model).to(dtype), targets, PAPER)
    with torch.no_grad():
        assert robust(dark().to(dtype)).equal(apart(robust)(dark().to(dtype)))


@pytest.mark.parametrize("on", ["bn", "relu"])
def test_hooks_still_run(on):
    model, calls = Block(lambda self, y, x: self.relu(y)).eval(), []
    targets = trueup.calibrate(model, [images(24)])
    model.get_submodule(on).register_forward_hook(lambda *_: calls.append(on))
    robust = trueup.correct(model, targets, PAPER)
    assert led(robust) == {"relu": ("relu",) if on == "bn" else ()}
    assert calls == [on]


@pytest.mark.usefixtures("norms_are_folded")
@pytest.mark.parametrize("which", ["leaky_relu", "relu", "add"])
def test_what_follows_another_site_is_not_done_before_it(which):
    model = Block(lambda self, y, x: F.relu(torch.add(F.leaky_relu(y), self.other(x)))).eval()
    options = {"activations": (torch.add,)}
    targets = trueup.calibrate(model, [images(24)], **options)
    robust = trueup.correct(model, targets, PAPER, select=lambda site: site.name == which, **options)
    assert led(robust) == {which: ("relu",) if which == "relu" else ()}
    with torch.no_grad():
        assert robust(dark()).equal(apart(robust)(dark()))


def test_a_sum_that_is_itself_a_site_stays():
    model = Block(lambda self, y, x: F.relu(torch.add(y, self.other(x))))
    robust = corrected(model, activations=(torch.add,))
    assert led(robust) == {"add": (), "relu": ("relu",)}
    twin = apart(robust)
    assert robust(dark()).equal(twin(dark()))


class Tail(nn.Module):
    """A vector that a batch norm and a relu follow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.relu = nn.Conv2d(3, 16, 3), nn.BatchNorm1d(16), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x).mean((2, 3))))


@pytest.mark.usefixtures("norms_are_folded")
def test_vectors_have_channels_too():
    robust = corrected(Tail())
    assert led(robust) == {"relu": ("norm", "relu")}
    assert robust(dark()).equal(apart(robust)(dark()))
