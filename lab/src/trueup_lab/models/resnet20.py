"""ResNet-20 for small images (He et al., 2016, section 4.2): a stem, three stages of three blocks, a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from trueup_lab.models.initialise import initialise
from trueup_lab.models.norms import TLU, NormName, has_threshold, norm_layer

Shortcut = Literal["projection", "pad"]
GROUPS = 8
"""Groups of group norm: two channels per group in the first stage (16), eight in the last (64)."""


class ResNet20(nn.Module):
    """Images (batch, `channels`, height, width) to logits (batch, `classes`); any size from 4 x 4 up.

    `shortcut` is used where a block changes the shape: `"projection"` is a 1 x 1 convolution and a norm (option B),
    `"pad"` takes every second pixel and adds channels of zeros, without parameters (option A).
    """

    def __init__(
        self,
        norm: NormName = "bn",
        *,
        channels: int = 3,
        classes: int = 10,
        shortcut: Shortcut = "projection",
        groups: int = GROUPS,
    ) -> None:
        super().__init__()
        if shortcut not in ("projection", "pad"):
            raise ValueError(f"unknown shortcut {shortcut!r}; known: projection, pad")
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = norm_layer(norm, 16, groups=groups)
        self.act1 = _activation(norm, 16)
        self.layer1 = _stage(16, 16, 1, norm, shortcut, groups)
        self.layer2 = _stage(16, 32, 2, norm, shortcut, groups)
        self.layer3 = _stage(32, 64, 2, norm, shortcut, groups)
        self.fc = nn.Linear(64, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with norms and activations, and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int, norm: NormName, shortcut: Shortcut, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm_layer(norm, width, groups=groups)
        self.act1 = _activation(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm_layer(norm, width, groups=groups)
        self.act2 = _activation(norm, width)
        self.shortcut: nn.Module = nn.Identity()
        if (stride, width_in) != (1, width):
            if shortcut == "pad":
                self.shortcut = PadShortcut(stride, width - width_in)
            else:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(width_in, width, 1, stride=stride, bias=False),
                    norm_layer(norm, width, groups=groups),
                )

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.act2(out + self.shortcut(x))


class PadShortcut(nn.Module):
    """Take every `stride`-th pixel and add `extra` channels of zeros, half before and half after (option A)."""

    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = extra // 2
        self.after = extra - extra // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


def _stage(width_in: int, width: int, stride: int, norm: NormName, shortcut: Shortcut, groups: int) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(width_in, width, stride, norm, shortcut, groups),
        BasicBlock(width, width, 1, norm, shortcut, groups),
        BasicBlock(width, width, 1, norm, shortcut, groups),
    )


def _activation(norm: NormName, channels: int) -> Callable[[Tensor], Tensor]:
    return TLU(channels) if has_threshold(norm) else F.relu
