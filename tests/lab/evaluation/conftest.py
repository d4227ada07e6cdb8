"""A small network with batch norm, and the digits that come with the package."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trueup
from trueup_lab.data.images import NORMALISATION
from trueup_lab.evaluation import Subject


def small_network(seed: int = 0, channels: int = 1) -> nn.Module:
    """Two convolutions with batch norm, as if trained: statistics, scales and shifts are all their own."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(channels, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.1, 1)
    return model.eval()


@pytest.fixture
def network():
    return small_network()


@pytest.fixture
def inputs():
    return torch.rand(12, 1, 28, 28, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def targets(network, inputs):
    return trueup.calibrate(network, [inputs], decide=False)


@pytest.fixture
def subject():
    return Subject("small", 0, "digits", "bn", NORMALISATION["digits"], "00000000", small_network())
