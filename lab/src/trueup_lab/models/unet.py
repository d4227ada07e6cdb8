"""A small U-Net (Ronneberger et al., 2015) with batch norm, for the drawn scenes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (12, 24, 40)


class UNet(nn.Module):
    """Images (batch, `channels`, height, width) to logits (batch, `classes`, height, width); any size.

    Three levels at a half, a quarter and an eighth of the size. The lowest has dilated convolutions, so that a pixel
    sees most of the picture. About 70,000 parameters.
    """

    def __init__(self, classes: int = 8, channels: int = 3) -> None:
        super().__init__()
        half, quarter, eighth = WIDTHS
        self.level1 = nn.Sequential(ConvolutionBlock(channels, half, stride=2), ConvolutionBlock(half, half))
        self.level2 = nn.Sequential(ConvolutionBlock(half, quarter, stride=2), ConvolutionBlock(quarter, quarter))
        self.level3 = nn.Sequential(
            ConvolutionBlock(quarter, eighth, stride=2),
            ConvolutionBlock(eighth, eighth, dilation=2),
            ConvolutionBlock(eighth, eighth, dilation=4),
        )
        self.up2 = ConvolutionBlock(eighth + quarter, quarter)
        self.up1 = ConvolutionBlock(quarter + half, half)
        self.classifier = nn.Conv2d(half, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        half = self.level1(x)
        quarter = self.level2(half)
        deep = self.up2(torch.cat((_enlarged(self.level3(quarter), quarter), quarter), dim=1))
        deep = self.up1(torch.cat((_enlarged(deep, half), half), dim=1))
        return _enlarged(self.classifier(deep), x)


class ConvolutionBlock(nn.Module):
    """A 3 x 3 convolution, batch norm and ReLU."""

    def __init__(self, width_in: int, width: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, 3, stride=stride, padding=dilation, dilation=dilation, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.relu(self.bn(self.conv(x)))
        return activated


def _enlarged(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)
