"""Normalisation layers by name, and the activation that belongs to each.

| name       | layer                                                     | activation                |
|------------|-----------------------------------------------------------|---------------------------|
| `bn`       | batch norm                                                | ReLU                      |
| `gn`       | group norm; the number of groups is the network's choice  | ReLU                      |
| `frn`      | filter response norm                                      | thresholded unit, `TLU`   |
| `frn-relu` | filter response norm                                      | ReLU                      |
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

NormName = Literal["bn", "gn", "frn", "frn-relu"]
NORMS: tuple[NormName, ...] = get_args(NormName)


class FilterResponseNorm(nn.Module):
    """Each channel of each image divided by the root of its mean square, then scaled and shifted.

    With `nu2` the mean of `x**2` over height and width, `y = weight * x / sqrt(nu2 + |eps|) + bias` on
    (batch, channels, height, width) (Singh and Krishnan, 2019). No mean is removed, and an image's
    output does not depend on its batch.

    >>> FilterResponseNorm(1)(torch.tensor([[[[3.0, -3.0]]]])).round(decimals=3)
    tensor([[[[ 1., -1.]]]], grad_fn=<RoundBackward1>)
    """

    trueup_site = "norm"
    """Says that this module is a norm with the channels second, to whoever looks for those in a network."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.channels = channels
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        # In the precision of the parameters, which autocast leaves in float32.
        nu2 = x.type_as(self.weight).square().mean(dim=(2, 3), keepdim=True)
        scale = self.weight.view(1, -1, 1, 1) * torch.rsqrt(nu2 + abs(self.eps))
        return (x * scale + self.bias.view(1, -1, 1, 1)).type_as(x)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"


class TLU(nn.Module):
    """The thresholded linear unit `max(x, tau)`, one learned threshold a channel: the activation of FRN.

    >>> TLU(1)(torch.tensor([[[[-1.0, 2.0]]]])).tolist()
    [[[[0.0, 2.0]]]]
    """

    trueup_site = True
    """Says that this module is an activation function, to whoever looks for those in a network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.tau = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(x, self.tau.view(1, -1, 1, 1).type_as(x))

    def extra_repr(self) -> str:
        return f"{self.channels}"


def norm_layer(norm: NormName, channels: int, *, groups: int, eps: float | None = None) -> nn.Module:
    """The normalisation called `norm` for `channels`; `groups` is for group norm, `eps` None for its default.

    >>> norm_layer("frn", 16, groups=8)
    FilterResponseNorm(16, eps=1e-06)
    """
    check_norm(norm)
    if norm == "bn":
        return nn.BatchNorm2d(channels, eps=1e-5 if eps is None else eps)
    if norm == "gn":
        return nn.GroupNorm(groups, channels, eps=1e-5 if eps is None else eps)
    return FilterResponseNorm(channels, eps=1e-6 if eps is None else eps)


def has_threshold(norm: NormName) -> bool:
    """Whether the activation that follows `norm` is the thresholded unit and not ReLU.

    >>> has_threshold("frn"), has_threshold("frn-relu")
    (True, False)
    """
    check_norm(norm)
    return norm == "frn"


def check_norm(norm: str) -> None:
    """Refuse a norm that is not one of `NORMS`."""
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}; known: {', '.join(NORMS)}")
