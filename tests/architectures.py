"""Small networks that write their activations in all the ways people do. Each takes (batch, 3, 32, 32)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def vgg() -> nn.Module:
    """One flat Sequential of modules, in place."""
    layers: list[nn.Module] = []
    width = 3
    for out in (8, 16, 16):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        width = out
    head = [nn.Flatten(), nn.Linear(16 * 4 * 4, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10)]
    return nn.Sequential(*layers, *head)


class InvertedResidual(nn.Module):
    """MobileNetV2's block."""

    def __init__(self, width: int, expand: int) -> None:
        super().__init__()
        hidden = width * expand
        self.conv = nn.Sequential(
            nn.Sequential(nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)),
            nn.Sequential(
                nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
                nn.BatchNorm2d(hidden),
                nn.ReLU6(inplace=True),
            ),
            nn.Conv2d(hidden, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class MobileNet(nn.Module):
    """MobileNetV2 in small: ReLU6 and depthwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.Sequential(InvertedResidual(8, 3), InvertedResidual(8, 3))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        x = F.adaptive_avg_pool2d(x, (1, 1)).reshape(x.shape[0], -1)
        return self.head(x)


class DenseNet(nn.Module):
    """Pre-activation blocks that concatenate everything before them."""

    def __init__(self, layers: int = 3, growth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + growth * k) for k in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(8 + growth * k, growth, 3, padding=1) for k in range(layers))
        self.head = nn.Linear(8 + growth * layers, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)), inplace=True)))
        return self.head(torch.relu(torch.cat(features, 1)).mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, LayerNorm over channels last, GELU, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(self.act(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """ConvNeXt in small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.Sequential(ConvNeXtBlock(8), ConvNeXtBlock(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean([-2, -1]))


class EncoderBlock(nn.Module):
    """Attention, then an MLP with F.gelu."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer in small: parameters of the root, a class token, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16))
        self.blocks = nn.ModuleList(EncoderBlock(16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Bottleneck(nn.Module):
    """torchvision's habit: one nn.ReLU in place, called three times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width // 2, 1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv2, self.bn2 = nn.Conv2d(width // 2, width // 2, 3, padding=1), nn.BatchNorm2d(width // 2)
        self.conv3, self.bn3 = nn.Conv2d(width // 2, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """A ResNet of bottlenecks in small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Bottleneck(8), Bottleneck(8))
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.relu(self.conv1(x)))
        return self.fc(self.dropout(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)))


class Compact(nn.Module):
    """The least that has all that compilers stumble over: a sum in place, a norm before the gate, norms in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv3, self.bn3, self.gn = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(x))
        out += x
        x = self.gn(self.bn3(self.conv3(self.relu(out))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Spellings(nn.Module):
    """Every way to write the activations that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.modules_too = nn.Sequential(nn.LeakyReLU(), nn.SiLU(), nn.Hardswish(), nn.GELU("tanh"), nn.ReLU6())
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)) - 0.1
        x = torch.relu(x) - 0.1
        x = x.relu() - 0.1
        x = x.relu_() - 0.1
        x = torch.relu_(x) - 0.1
        x = F.relu_(x) - 0.1
        x = F.relu6(x) - 0.1
        x = F.leaky_relu(x, 0.2, inplace=True) - 0.1
        x = F.silu(x)
        x = F.hardswish(x)
        x = self.modules_too(x)
        return self.head(x.mean((2, 3)))


class Branching(nn.Module):
    """Decides by the data: symbolic tracing cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return F.relu(x)
        return F.relu(-x)


def branching() -> nn.Module:
    """A network with a part that cannot be followed between parts that can."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Branching(), nn.Flatten(), nn.LazyLinear(10))


ALL = {
    "vgg": vgg,
    "mobilenet": MobileNet,
    "densenet": DenseNet,
    "convnext": ConvNeXt,
    "vit": ViT,
    "resnet": ResNet,
    "spellings": Spellings,
}


def make(name: str) -> nn.Module:
    """A network of `ALL`, or "compact", in evaluation mode, with running statistics that are not trivial."""
    torch.manual_seed(0)
    model = {**ALL, "compact": Compact}[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def images(count: int = 12, size: int = 32, seed: int = 1) -> Tensor:
    """Smooth made-up images."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 8, 8, generator=generator)
    return F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
