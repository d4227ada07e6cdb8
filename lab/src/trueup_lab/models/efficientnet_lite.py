"""EfficientNet-Lite: EfficientNet (Tan and Le, 2019) without squeeze-and-excitation, with ReLU6 for swish."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from trueup_lab.models.initialise import initialise

STAGES = (
    # expansion, width, blocks, stride, kernel
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
STEM, HEAD = 32, 1280
EPS = 1e-3
SCALES = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2))
"""Width and depth of Lite0, Lite1 and Lite2, relative to Lite0."""


class EfficientNetLite(nn.Module):
    """Images (batch, `channels`, height, width) to logits (batch, `classes`); `variant` is the number after "Lite".

    Parameters have the names of the package efficientnet_lite_pytorch, and convolutions have TensorFlow's "SAME"
    padding. The public weights expect pixels from 0 to 255 as `(pixel - 127) / 128`.
    """

    def __init__(self, classes: int = 1000, channels: int = 3, variant: int = 0) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(channels, STEM, 3, stride=2)
        self._bn0 = nn.BatchNorm2d(STEM, eps=EPS)
        self._act0 = nn.ReLU6(inplace=True)
        blocks: list[nn.Module] = []
        width_in = STEM
        for expansion, width, repeats, stride, kernel in stages(variant):
            for k in range(repeats):
                blocks.append(MBConv(width_in, width, expansion, stride if k == 0 else 1, kernel))
                width_in = width
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = nn.Conv2d(width_in, HEAD, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(HEAD, eps=EPS)
        self._act1 = nn.ReLU6(inplace=True)
        self._dropout = nn.Dropout(0.2)
        self._fc = nn.Linear(HEAD, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self._blocks(self._act0(self._bn0(self._conv_stem(x))))
        x = self._act1(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(self._dropout(x.mean(dim=(2, 3))))
        return logits


def stages(variant: int) -> list[tuple[int, int, int, int, int]]:
    """Rows of `STAGES`, scaled. Widths are multiples of 8; the first and the last stage keep their one block.

    >>> stages(2)[2:4]
    [(6, 48, 3, 2, 5), (6, 88, 4, 2, 3)]
    """
    wider, deeper = SCALES[variant]
    found = []
    for number, (expansion, width, repeats, stride, kernel) in enumerate(STAGES):
        blocks = math.ceil(repeats * deeper) if 0 < number < len(STAGES) - 1 else repeats
        found.append((expansion, int(width * wider + 4) // 8 * 8, blocks, stride, kernel))
    return found


class MBConv(nn.Module):
    """A 1 x 1 convolution up to `expansion` times the width, a depthwise one, a 1 x 1 down; maybe a shortcut."""

    def __init__(self, width_in: int, width: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        hidden = expansion * width_in
        self.expands = expansion != 1
        if self.expands:
            self._expand_conv = nn.Conv2d(width_in, hidden, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(hidden, eps=EPS)
            self._act0 = nn.ReLU6(inplace=True)
        self._depthwise_conv = SameConv2d(hidden, hidden, kernel, stride=stride, groups=hidden)
        self._bn1 = nn.BatchNorm2d(hidden, eps=EPS)
        self._act1 = nn.ReLU6(inplace=True)
        self._project_conv = nn.Conv2d(hidden, width, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(width, eps=EPS)
        self.has_shortcut = (stride, width_in) == (1, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._act0(self._bn0(self._expand_conv(x))) if self.expands else x
        out = self._act1(self._bn1(self._depthwise_conv(out)))
        out = self._bn2(self._project_conv(out))
        return x + out if self.has_shortcut else out


class SameConv2d(nn.Conv2d):
    """A convolution with stride 1 or 2 and TensorFlow's "SAME" padding, which depends on the input's size.

    With stride 2, a side of even length gets `kernel - 2` zeros, one of odd length `kernel - 1`. If that number is odd,
    the extra zero comes last.
    """

    def __init__(self, width_in: int, width: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(width_in, width, kernel, stride=stride, padding=padding, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.stride[0] == 1:
            return super().forward(x)
        height, width = (self.kernel_size[0] - 2 + x.shape[k] % 2 for k in (2, 3))
        x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return super().forward(x)
