"""ESPNet (Mehta et al., 2018) for semantic segmentation: pyramids of dilated convolutions, and a light decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

EPS = 1e-3


class ESPNet(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, `classes`, height, width); any size.

    `blocks` are the numbers of pyramids at a quarter and an eighth of the size (p and q in the paper). Parameters have
    the names of the authors' code. The CamVid weights expect channels in the order blue, green, red.
    """

    def __init__(self, classes: int = 12, blocks: tuple[int, int] = (2, 8)) -> None:
        super().__init__()
        self.encoder = Encoder(classes, blocks)
        self.br = nn.BatchNorm2d(classes, eps=EPS)
        self.up_l3 = nn.Sequential(_twice(classes))
        self.level3_C = Convolution(131, classes, 1)
        self.combine_l2_l3 = nn.Sequential(
            NormAndActivation(2 * classes), Pyramid(2 * classes, classes, has_shortcut=False)
        )
        self.up_l2 = nn.Sequential(_twice(classes), NormAndActivation(classes))
        self.conv = ConvolutionNormActivation(19 + classes, classes, stride=1)
        self.classifier = _twice(classes)

    def forward(self, x: Tensor) -> Tensor:
        half, quarter, eighth = self.encoder(x)
        deep = _cropped(self.up_l3(self.br(eighth)), quarter)
        deep = self.combine_l2_l3(torch.cat((self.level3_C(quarter), deep), dim=1))
        deep = _cropped(self.up_l2(deep), half)
        deep = self.conv(torch.cat((deep, half), dim=1))
        return _cropped(self.classifier(deep), x)


class Encoder(nn.Module):
    """Computes features at half (19 channels) and a quarter (131) of the size, and logits at an eighth."""

    def __init__(self, classes: int, blocks: tuple[int, int]) -> None:
        super().__init__()
        self.level1 = ConvolutionNormActivation(3, 16, stride=2)
        self.b1 = NormAndActivation(16 + 3)
        self.level2_0 = DownPyramid(16 + 3, 64)
        self.level2 = nn.Sequential(*(Pyramid(64, 64) for _ in range(blocks[0])))
        self.b2 = NormAndActivation(64 + 64 + 3)
        self.level3_0 = DownPyramid(64 + 64 + 3, 128)
        self.level3 = nn.Sequential(*(Pyramid(128, 128) for _ in range(blocks[1])))
        self.b3 = NormAndActivation(128 + 128)
        self.classifier = Convolution(128 + 128, classes, 1)
        self.reduce1 = nn.AvgPool2d(3, stride=2, padding=1)
        self.reduce2 = nn.AvgPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image = self.reduce1(x)
        half = self.b1(torch.cat((self.level1(x), image), dim=1))
        first = self.level2_0(half)
        quarter = self.b2(torch.cat((self.level2(first), first, self.reduce2(image)), dim=1))
        first = self.level3_0(quarter)
        eighth = self.b3(torch.cat((first, self.level3(first)), dim=1))
        return half, quarter, self.classifier(eighth)


class Dilated(nn.Module):
    """Five 3 x 3 convolutions of growing dilation, each with a fifth of `width`.

    All but the first are summed cumulatively before they are concatenated, which removes the gridding artefacts of
    dilation.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        part = width // 5
        self.d1 = Convolution(part, width - 4 * part, 3, dilation=1)
        self.d2 = Convolution(part, part, 3, dilation=2)
        self.d4 = Convolution(part, part, 3, dilation=4)
        self.d8 = Convolution(part, part, 3, dilation=8)
        self.d16 = Convolution(part, part, 3, dilation=16)

    def pyramid(self, x: Tensor) -> Tensor:
        """Return the outputs of all five, concatenated."""
        sum2 = self.d2(x)
        sum4 = sum2 + self.d4(x)
        sum8 = sum4 + self.d8(x)
        sum16 = sum8 + self.d16(x)
        return torch.cat((self.d1(x), sum2, sum4, sum8, sum16), dim=1)


class Pyramid(Dilated):
    """A 1 x 1 convolution down to a fifth of the width, the pyramid, and a shortcut."""

    def __init__(self, width_in: int, width: int, has_shortcut: bool = True) -> None:
        super().__init__(width)
        self.c1 = Convolution(width_in, width // 5, 1)
        self.bn = NormAndActivation(width)
        self.has_shortcut = has_shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = self.pyramid(self.c1(x))
        activated: Tensor = self.bn(x + out if self.has_shortcut else out)
        return activated


class DownPyramid(Dilated):
    """A 3 x 3 convolution with stride 2 down to a fifth of the width, and the pyramid."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__(width)
        self.c1 = Convolution(width_in, width // 5, 3, stride=2)
        self.bn = nn.BatchNorm2d(width, eps=EPS)
        self.act = nn.PReLU(width)

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(self.bn(self.pyramid(self.c1(x))))
        return activated


class Convolution(nn.Module):
    """A convolution without bias, padded to keep the size if its stride is 1."""

    def __init__(self, width_in: int, width: int, kernel: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        padding = kernel // 2 * dilation
        self.conv = nn.Conv2d(width_in, width, kernel, stride=stride, padding=padding, dilation=dilation, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class NormAndActivation(nn.Module):
    """Batch norm and PReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(width, eps=EPS)
        self.act = nn.PReLU(width)

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(self.bn(x))
        return activated


class ConvolutionNormActivation(nn.Module):
    """A 3 x 3 convolution, batch norm and PReLU."""

    def __init__(self, width_in: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width, eps=EPS)
        self.act = nn.PReLU(width)

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(self.bn(self.conv(x)))
        return activated


def _twice(width: int) -> nn.ConvTranspose2d:
    """Return a learned upsampling to twice the height and width."""
    return nn.ConvTranspose2d(width, width, 2, stride=2, bias=False)


def _cropped(x: Tensor, like: Tensor) -> Tensor:
    """Cut `x` to the size of `like`. It can be one row or column larger, because halving an odd size rounds up."""
    return x[:, :, : like.shape[2], : like.shape[3]]
