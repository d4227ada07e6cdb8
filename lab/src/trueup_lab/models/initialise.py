"""How untrained networks start."""

from __future__ import annotations

from torch import nn


def initialise(network: nn.Module) -> None:
    """Convolutions from He's normal distribution over their outputs; the rest keeps PyTorch's own start."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
