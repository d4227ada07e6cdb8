"""A small VGG (Simonyan and Zisserman, 2015) with batch norm, for 32 x 32 images."""

from __future__ import annotations

from torch import Tensor, nn

from trueup_lab.models.initialise import initialise

STAGES = ((64, 64), (128, 128), (256, 256, 256))
"""Widths of the 3 x 3 convolutions. Each stage ends by halving the map."""


class VGG(nn.Module):
    """Images (batch, `channels`, height, width) to logits (batch, `classes`); any size from 8 x 8 up.

    Seven convolutions and one linear layer on the mean of the last map, 1.7 million parameters.
    """

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width_in = channels
        for stage in STAGES:
            for width in stage:
                layers.append(nn.Conv2d(width_in, width, 3, padding=1, bias=False))
                layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                width_in = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(width_in, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(x).mean(dim=(2, 3)))
        return logits
