"""Forward passes that may run twice, while a GPU's kernels are compiled in between."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trueup
from architectures import images
from graph.test_reading import WRITES, Overwriting
from trueup import kernels
from trueup.graph import trace
from trueup.graph.memory import is_repeatable


@pytest.mark.parametrize("name", WRITES)
def test_a_model_that_writes_into_its_input_or_buffers_cannot_be_run_twice(name):
    found = trace(Overwriting(WRITES[name]).eval())
    assert is_repeatable(found.model, found.graph) == (name == "nothing")


class Foreign(nn.Module):
    """A leaf that nobody has looked into."""

    def forward(self, x):
        return x + 1


def test_a_module_that_was_not_traced_into_may_keep_something():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Foreign()).eval()
    for leaves, expected in (((), True), ((Foreign,), False)):
        found = trace(model, leaves=leaves)
        assert is_repeatable(found.model, found.graph) == expected


def test_a_pass_is_repeated_only_if_no_hook_sees_it(monkeypatch):
    model = Overwriting(WRITES["nothing"]).eval()
    x = images(4)
    robust = trueup.correct(model, trueup.calibrate(model, [x], decide=False), trueup.Evidence(budget=1, base=0))
    wanted = robust(x)
    asked = []

    def twice(run, first, repeatable):
        asked.append(repeatable())
        assert first is x
        run()
        return run()

    monkeypatch.setattr(kernels, "compile_together", twice)
    assert robust(x).equal(wanted)
    handle = robust.model.conv2.register_forward_hook(lambda *_: None)
    robust(x)
    handle.remove()
    robust(x)
    assert asked == [True, False, True]


@pytest.mark.gpu
def test_the_first_answer_on_a_gpu_is_that_of_every_later_call():
    model = Overwriting(WRITES["nothing"]).eval().cuda()
    x = images(4).cuda()
    robust = trueup.correct(model, trueup.calibrate(model, [x], decide=False), trueup.Evidence(budget=1, base=0))
    with torch.inference_mode():
        first = robust(x)
        assert not first.equal(model(x))
        for _ in range(2):
            assert robust(x).equal(first)
