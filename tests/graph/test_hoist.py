"""Paths to modules, looked up once."""

from __future__ import annotations

import torch
from torch import fx, nn

import trueup
from architectures import images, make
from trueup.graph.hoist import function_of, hoist_paths


def lookups(module, x):
    """Number of attributes of modules that a forward pass looks up in Python."""
    count, real = [0], nn.Module.__getattr__

    def counted(self, name):
        count[0] += 1
        return real(self, name)

    nn.Module.__getattr__ = counted
    try:
        with torch.no_grad():
            module(x)
    finally:
        nn.Module.__getattr__ = real
    return count[0]


def test_a_corrected_model_looks_up_little_more_than_the_model():
    model, x = make("resnet"), images(2)
    targets = trueup.calibrate(model, [images(8)], decide=False)
    robust = trueup.correct(model, targets, trueup.Evidence(budget=1))
    assert lookups(robust, x) < lookups(model, x) + 5 * len(robust.sites)


def test_names_of_nodes_and_odd_attributes_are_kept():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"a-b": nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "on_path_0": nn.Tanh()})
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            on_path_0 = self.parts["on_path_0"](x)
            return self.parts["a-b"](on_path_0) * self.scale

    module, x = Odd(), torch.randn(2, 3)
    graph = fx.Tracer().trace(module)
    graph.on_generate_code(lambda _: hoist_paths)
    traced = fx.GraphModule(module, graph)
    assert "_on_path_0 = self.parts" in traced.code
    assert traced(x).equal(module(x))


def test_steps_to_modules_are_looked_up_where_modules_are_kept():
    """A module that is replaced later is the one that runs, and parameters are still attributes."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.layers[1](self.layers[0](x)) * self.scale

    module, x = Scaled(), torch.randn(2, 3)
    forward = function_of(fx.Tracer().trace(module), module)
    assert forward(module, x).equal(module(x))
    names = forward.__code__.co_names
    assert "_modules" in names
    assert "layers" not in names
    assert "scale" in names
    module.layers[1] = nn.ReLU()
    module.scale = nn.Parameter(torch.tensor(3.0))
    assert forward(module, x).equal(module(x))


def test_what_is_no_path_from_self_is_left():
    lines = ["a = x.size(0)\n", "b = getattr(x, name)\n", "return self.one(a, key=self.parts.two(b))\n"]
    assert "".join(hoist_paths(lines)) == (
        "on_path_0 = self.parts\na = x.size(0)\nb = getattr(x, name)\nreturn self.one(a, key=on_path_0.two(b))\n"
    )
