"""MobileNetV2 (Sandler et al., 2018): inverted bottlenecks with depthwise convolutions and ReLU6."""

from __future__ import annotations

from torch import Tensor, nn

from trueup_lab.models.initialise import initialise

STAGES = (
    # expansion, width, blocks, stride
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM, HEAD = 32, 1280


class MobileNetV2(nn.Module):
    """Images (batch, `channels`, height, width) to logits (batch, `classes`). Parameters have torchvision's names.

    With `small`, for 32 x 32 images, the stem and the first stage with a stride do not halve the map, so the last map
    is 4 x 4 instead of 1 x 1.
    """

    def __init__(self, classes: int = 1000, channels: int = 3, small: bool = False) -> None:
        super().__init__()
        blocks: list[nn.Module] = [_convolution(channels, STEM, 3, stride=1 if small else 2)]
        width_in = STEM
        for stage, (expansion, width, repeats, stride) in enumerate(STAGES):
            first = 1 if small and stage == 1 else stride
            for k in range(repeats):
                blocks.append(InvertedResidual(width_in, width, expansion, first if k == 0 else 1))
                width_in = width
        self.features = nn.Sequential(*blocks, _convolution(width_in, HEAD, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(HEAD, classes))
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean(dim=(2, 3)))
        return logits


class InvertedResidual(nn.Module):
    """A 1 x 1 convolution up to `expansion` times the width, a 3 x 3 depthwise, a 1 x 1 down; maybe a shortcut."""

    def __init__(self, width_in: int, width: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = expansion * width_in
        layers: list[nn.Module] = [] if expansion == 1 else [_convolution(width_in, hidden, 1)]
        layers += [
            _convolution(hidden, hidden, 3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, width, 1, bias=False),
            nn.BatchNorm2d(width),
        ]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = (stride, width_in) == (1, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.has_shortcut else out


def _convolution(width_in: int, width: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width_in, width, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU6(inplace=True),
    )
