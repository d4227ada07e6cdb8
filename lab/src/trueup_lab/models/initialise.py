"""How untrained networks start."""

from __future__ import annotations

from torch import nn


def initialise(network: nn.Module) -> None:
    """Convolutions from He's normal distribution over their outputs; the rest keeps PyTorch's own start."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def initialise_narrow(network: nn.Module) -> None:
    """Convolutions and linear layers from a narrow normal distribution, biases 0: the start of ViT and ConvNeXt."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
