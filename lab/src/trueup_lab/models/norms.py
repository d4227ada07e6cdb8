"""Normalisation layers by name, and the activation that follows each.

| name       | layer                                                     | activation                |
|------------|-----------------------------------------------------------|---------------------------|
| `bn`       | batch norm                                                | ReLU                      |
| `gn`       | group norm; the network sets the number of groups         | ReLU                      |
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
    """Divide each channel of each image by its root mean square, then scale and shift it (Singh and Krishnan, 2019).

    On (batch, channels, height, width), with `nu2` the mean of `x**2` over height and width:
    `y = weight * x / sqrt(nu2 + |eps|) + bias`. The mean is not removed, and an image's output does not depend on its
    batch.

    >>> FilterResponseNorm(1)(torch.tensor([[[[3.0, -3.0]]]])).round(decimals=3)
    tensor([[[[ 1., -1.]]]], grad_fn=<RoundBackward1>)
    """

    trueup_site = "norm"
    """Tells `trueup.sites` that this module is a norm with its channels in the second dimension."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.channels = channels
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        # Computed in the precision of the parameters, which autocast leaves in float32.
        nu2 = x.type_as(self.weight).square().mean(dim=(2, 3), keepdim=True)
        scale = self.weight.view(1, -1, 1, 1) * torch.rsqrt(nu2 + abs(self.eps))
        return (x * scale + self.bias.view(1, -1, 1, 1)).type_as(x)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"


class TLU(nn.Module):
    """The thresholded linear unit `max(x, tau)` with one learned threshold per channel: the activation of FRN.

    >>> TLU(1)(torch.tensor([[[[-1.0, 2.0]]]])).tolist()
    [[[[0.0, 2.0]]]]
    """

    trueup_site = True
    """Tells `trueup.sites` that this module is an activation function."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.tau = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(x, self.tau.view(1, -1, 1, 1).type_as(x))

    def extra_repr(self) -> str:
        return f"{self.channels}"


def norm_layer(norm: NormName, channels: int, *, groups: int, eps: float | None = None) -> nn.Module:
    """Return the norm called `norm`. `groups` applies to group norm; `eps` None is the norm's default.

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
    """Return whether the activation after `norm` is the thresholded unit instead of ReLU.

    >>> has_threshold("frn"), has_threshold("frn-relu")
    (True, False)
    """
    check_norm(norm)
    return norm == "frn"


def check_norm(norm: str) -> None:
    """Raise if the norm is not one of `NORMS`."""
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}; known: {', '.join(NORMS)}")
