"""Models whose norms, sums and relus are done in one pass with what is placed there, and the same without."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from architectures import images

BOTH = trueup.Evidence(budget=1, strength=0.2)
SHUT = trueup.Evidence(budget=0.05, strength=0.2, least=0)
LEAST = trueup.Evidence(budget=0.05, strength=0.2, least=0.2)
NOTHING = trueup.Evidence(strength=0, base=0)
FIRST, LAST, INTO = "value first", "residual first", "in place"  # of a norm and what is added to it
every = pytest.mark.parametrize("rule", [BOTH, SHUT, LEAST, NOTHING], ids=["both", "shut", "least", "nothing"])


def apart(robust):
    """The same, with every norm, sum and relu where the model has it."""
    twin = copy.deepcopy(robust)
    for module in twin.placed:
        module.absorbs = ()
    return copy.deepcopy(twin)  # built again


def corrected(model, rule):
    return trueup.correct(model, calibrated(model), rule)


def calibrated(model):
    return trueup.calibrate(model, images(48).split(24), select=lambda site: site.kind == "norm")


def dark(count=8):
    """Images unlike those of calibration."""
    return images(count, seed=3) * 0.3 - 1


class Block(nn.Module):
    """Two branches, of which the first ends in a norm, and what a model may do with them."""

    def __init__(self, follow, relu=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.other = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3)
        self.follow, self.relu, self.head = follow, relu or nn.ReLU(), nn.Conv2d(4, 2, 1)
        self.register_buffer("bias", torch.randn(4, 1, 1))
        nn.init.uniform_(self.bn.running_mean, -0.3, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.follow(self, self.bn(self.conv(x)), x))


# What a model may do with the norm of its first branch, `y`, and its input `x`.


def iadd(self, y, x):
    y += self.other(x)
    return self.relu(y)


def iadd_to_the_other(self, y, x):
    r = self.other(x)
    r += y
    return self.relu(r)


def sum_is_read(self, y, x):
    z = y + self.other(x)
    return F.relu(z) + z


def norm_is_read(self, y, x):
    return F.relu(y + self.other(x)) + y


def residual_is_overwritten(self, y, x):
    r = self.other(x)
    z = y + r
    r.mul_(3)
    return F.relu(z) + r
