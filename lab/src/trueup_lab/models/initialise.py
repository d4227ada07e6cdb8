"""Initialisation of untrained networks."""

from __future__ import annotations

from torch import nn


def initialise(network: nn.Module) -> None:
    """Draw convolutions from He's normal distribution (fan out); other layers keep PyTorch's initialisation."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def initialise_narrow(network: nn.Module) -> None:
    """Draw convolutions and linear layers from a narrow normal distribution and set biases to 0, as ViTs do."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
