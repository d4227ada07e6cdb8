"""The relu in one pass with the correction: where the graph allows it, and nowhere else."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trueup

FAST = trueup.Correction(1, 0.2, method="histogram")


def sites_fused(robust):
    """For each site, whether what was placed there applies the activation itself."""
    seen = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _i, options, _o, name=name: seen.update({name: "activation" in options}), with_kwargs=True
        )
        for name, module in zip(robust.sites, robust.placed, strict=True)
    ]
    robust(torch.randn(2, 3, 8, 8))
    for hook in hooks:
        hook.remove()
    return seen


class Block(nn.Module):
    """A convolution and an activation, written as asked."""

    def __init__(self, activate, module=None) -> None:
        super().__init__()
        self.conv, self.module, self.activate = nn.Conv2d(3, 4, 3), module, activate

    def forward(self, x):
        return self.activate(self, self.conv(x))


def in_place_then_read(self, x):
    y = self.module(x)
    return y + x


class Loud(nn.ReLU):
    """Something that a plain relu is not."""

    def forward(self, x):
        return super().forward(x) * 2


SPELLINGS = {
    "module": (Block(lambda self, x: self.module(x), nn.ReLU()), True),
    "module in place": (Block(lambda self, x: self.module(x), nn.ReLU(inplace=True)), True),
    "module, by keyword": (Block(lambda self, x: self.module(input=x), nn.ReLU()), True),
    "function": (Block(lambda _, x: F.relu(x)), True),
    "function in place": (Block(lambda _, x: F.relu(x, inplace=True)), True),
    "torch.relu": (Block(lambda _, x: torch.relu(x)), True),
    "method": (Block(lambda _, x: x.relu()), True),
    "method in place": (Block(lambda _, x: x.relu_()), True),
    "read again, not in place": (Block(in_place_then_read, nn.ReLU()), True),
    "read again, in place": (Block(in_place_then_read, nn.ReLU(inplace=True)), False),
    "a subclass": (Block(lambda self, x: self.module(x), Loud()), False),
    "another activation": (Block(lambda self, x: self.module(x), nn.ReLU6()), False),
}


@pytest.mark.parametrize(("model", "fused"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_a_plain_relu_is_applied_by_the_correction_and_nothing_changes(model, fused):
    torch.manual_seed(0)
    model.conv.reset_parameters()
    model = model.eval()
    targets = trueup.calibrate(model, [torch.randn(8, 3, 8, 8)])
    robust = trueup.correct(model, targets, FAST)
    assert list(sites_fused(robust).values()) == [fused]
    apart = trueup.correct(model, targets, FAST)
    for module in apart.placed:
        module.absorbs = ()
    apart = copy.deepcopy(apart)  # built again
    assert list(sites_fused(apart).values()) == [False]
    x = torch.randn(4, 3, 8, 8)
    assert robust(x).equal(apart(x))
    exact = trueup.correct(model, targets, trueup.Correction(1, 0.2, method="sort"))
    assert list(sites_fused(exact).values()) == [False]
    torch.testing.assert_close(robust(x), exact(x), atol=0.1, rtol=0.05)
    twin = copy.deepcopy(robust)
    assert list(sites_fused(twin).values()) == [fused]
    assert twin(x).equal(robust(x))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_on_a_relu_still_runs(register, inplace):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace), nn.Conv2d(4, 4, 3), nn.ReLU(inplace)).eval()
    targets = trueup.calibrate(model, [torch.randn(8, 3, 8, 8)])
    calls = []
    getattr(model[1], register)(lambda *_: calls.append(1))
    robust = trueup.correct(model, targets, FAST)
    assert sites_fused(robust) == {"1": False, "3": True}
    assert len(calls) == 1


def relu(x):
    """A user's function that happens to have that name."""
    return F.softplus(x)


def test_a_function_that_is_only_called_relu_is_not_taken_for_one():
    model = Block(lambda _, x: relu(x)).eval()
    targets = trueup.calibrate(model, [torch.randn(8, 3, 8, 8)], activations=(relu,))
    robust = trueup.correct(model, targets, FAST, activations=(relu,))
    assert list(sites_fused(robust).values()) == [False]


def test_a_zero_step_is_the_models_relu():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    robust = trueup.correct(model, trueup.calibrate(model, [torch.randn(8, 3, 8, 8)]), trueup.Correction(0))
    x = torch.randn(2, 3, 8, 8)
    assert robust(x).equal(model(x))


def test_the_input_is_not_written_to():
    model = nn.Sequential(nn.ReLU(inplace=True)).eval()
    targets = trueup.calibrate(model, [torch.randn(8, 30)])
    robust = trueup.correct(model, targets, FAST)
    given = nn.Sequential(nn.Linear(30, 30, bias=False), robust).eval()
    assert given(torch.randn(4, 30)).shape == (4, 30)
    model = nn.Sequential(nn.ReLU()).eval()
    robust = trueup.correct(model, targets, FAST)
    x = torch.randn(4, 30)
    before = x.clone()
    robust(x)
    assert x.equal(before)


def test_double_precision_sorts_after_its_relu():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double().eval()
    targets = trueup.calibrate(model, [torch.randn(8, 3, 8, 8).double()])
    x = torch.randn(2, 3, 8, 8).double()
    exact = trueup.correct(model, targets, trueup.Correction(1, 0.2, method="sort"))
    assert trueup.correct(model, targets, FAST)(x).equal(exact(x))
