"""A small ConvNeXt (Liu et al., 2022) with layer norm, for 32 x 32 images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trueup_lab.models.initialise import initialise_narrow

STAGES = ((64, 2), (128, 4), (256, 2))
"""Width and number of blocks of each stage. A stage begins by halving the map."""
EPS = 1e-6
SCALE = 0.1
"""Initial value of each block's learned scale. The original's 1e-6 suits deep networks with long training."""


class ConvNeXt(nn.Module):
    """Images (batch, `channels`, height, width) to logits (batch, `classes`); any size from 8 x 8 up.

    1.9 million parameters.
    """

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        width_in = channels
        for k, (width, blocks) in enumerate(STAGES):
            halve = nn.Conv2d(width_in, width, 2, stride=2)
            # The first convolution reads the image, so its norm comes after it.
            down = [halve, ChannelNorm(width)] if k == 0 else [ChannelNorm(width_in), halve]
            stages.append(nn.Sequential(*down, *(ConvNeXtBlock(width) for _ in range(blocks))))
            width_in = width
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(width_in, eps=EPS)
        self.fc = nn.Linear(width_in, classes)
        initialise_narrow(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.norm(self.stages(x).mean(dim=(2, 3))))
        return logits


class ConvNeXtBlock(nn.Module):
    """A 7 x 7 depthwise convolution, layer norm, and per pixel a perceptron four times as wide; with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), SCALE))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.depthwise(x).permute(0, 2, 3, 1)
        out = self.scale * self.down(self.act(self.up(self.norm(out))))
        return x + out.permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each pixel of (batch, channels, height, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.permute(0, 2, 3, 1))
        return out.permute(0, 3, 1, 2)
