"""A placed module is called directly only where nothing can tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trueup.graph import PlacedModule


class Twice(PlacedModule):
    def forward(self, a):
        return 2 * a


def eager(module):
    return module


def compiled(module):
    torch.compiler.reset()
    return torch.compile(module, backend="aot_eager")


@pytest.mark.parametrize("way", [eager, compiled])
@pytest.mark.parametrize("gradients", [False, True])
def test_hooks_run(way, gradients):
    module, x = Twice(), torch.ones(3, requires_grad=gradients)
    module.register_forward_pre_hook(lambda _module, given: (given[0] + 1,))
    module.register_forward_hook(lambda _module, _given, out: out + 5)
    with torch.set_grad_enabled(gradients):
        assert way(nn.Sequential(module))(x).tolist() == [9.0] * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
@pytest.mark.parametrize("way", [eager, compiled])
def test_backward_hooks_run(way):
    module, x = Twice(), torch.ones(3, requires_grad=True)
    module.register_full_backward_hook(lambda _module, to_input, _to_output: (10 * to_input[0],))
    way(nn.Sequential(module))(x).sum().backward()
    assert x.grad.tolist() == [20.0] * 3


def test_hooks_of_all_modules_run():
    seen, module = [], Twice()
    handle = nn.modules.module.register_module_forward_hook(lambda called, *_: seen.append(called))
    try:
        with torch.no_grad():
            module(torch.ones(3))
    finally:
        handle.remove()
    assert seen == [module]
