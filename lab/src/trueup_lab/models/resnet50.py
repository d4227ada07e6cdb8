"""ResNet-50 for ImageNet (He et al., 2016): a stem, stages of 3, 4, 6 and 3 bottlenecks, a classifier."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from trueup_lab.models.initialise import initialise
from trueup_lab.models.norms import TLU, NormName, has_threshold, norm_layer

StrideOn = Literal["3x3", "1x1"]
GROUPS = 32
"""Groups of group norm, as its authors chose for this network (Wu and He, 2018)."""


class ResNet50(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, `classes`). Parameters have torchvision's names.

    `stride_on` is the convolution of a bottleneck that has the stride: `"3x3"` (torchvision, "v1.5") or the first
    `"1x1"` (the original). `eps` is the norm's; None is the norm's default.
    """

    def __init__(
        self,
        norm: NormName = "bn",
        *,
        classes: int = 1000,
        stride_on: StrideOn = "3x3",
        groups: int = GROUPS,
        eps: float | None = None,
    ) -> None:
        super().__init__()
        if stride_on not in ("3x3", "1x1"):
            raise ValueError(f"unknown stride_on {stride_on!r}; known: 3x3, 1x1")
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm_layer(norm, 64, groups=groups, eps=eps)
        self.relu = TLU(64) if has_threshold(norm) else nn.ReLU(inplace=True)

        def stage(width_in: int, width: int, blocks: int, stride: int) -> nn.Sequential:
            first = Bottleneck(width_in, width, stride, norm, stride_on, groups, eps)
            rest = (Bottleneck(4 * width, width, 1, norm, stride_on, groups, eps) for _ in range(blocks - 1))
            return nn.Sequential(first, *rest)

        self.layer1 = stage(64, 64, 3, 1)
        self.layer2 = stage(256, 128, 4, 2)
        self.layer3 = stage(512, 256, 6, 2)
        self.layer4 = stage(1024, 512, 3, 2)
        self.fc = nn.Linear(2048, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class Bottleneck(nn.Module):
    """A 1 x 1 convolution down to `width`, a 3 x 3, a 1 x 1 up to four times `width`, and a shortcut.

    With ReLU, one module in place serves as all three activations, as in torchvision. Thresholded units are three
    modules, because their thresholds are learned.
    """

    def __init__(
        self,
        width_in: int,
        width: int,
        stride: int,
        norm: NormName,
        stride_on: StrideOn,
        groups: int,
        eps: float | None,
    ) -> None:
        super().__init__()
        width_out = 4 * width
        first, second = (stride, 1) if stride_on == "1x1" else (1, stride)
        self.conv1 = nn.Conv2d(width_in, width, 1, stride=first, bias=False)
        self.bn1 = norm_layer(norm, width, groups=groups, eps=eps)
        self.conv2 = nn.Conv2d(width, width, 3, stride=second, padding=1, bias=False)
        self.bn2 = norm_layer(norm, width, groups=groups, eps=eps)
        self.conv3 = nn.Conv2d(width, width_out, 1, bias=False)
        self.bn3 = norm_layer(norm, width_out, groups=groups, eps=eps)
        if has_threshold(norm):
            self.act1: nn.Module = TLU(width)
            self.act2: nn.Module = TLU(width)
            self.act3: nn.Module = TLU(width_out)
        else:
            self.act1 = self.act2 = self.act3 = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if (stride, width_in) != (1, width_out):
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False),
                norm_layer(norm, width_out, groups=groups, eps=eps),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.act2(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        activated: Tensor = self.act3(out + self.downsample(x))
        return activated
