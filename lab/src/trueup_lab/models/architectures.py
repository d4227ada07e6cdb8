"""The architectures that can be trained and stored, by name. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from torch import nn

from trueup_lab.models.convnext import ConvNeXt
from trueup_lab.models.mobilenet_v2 import MobileNetV2
from trueup_lab.models.norms import NORMS, NormName
from trueup_lab.models.resnet20 import ResNet20, Shortcut
from trueup_lab.models.unet import UNet
from trueup_lab.models.vgg import VGG
from trueup_lab.models.vit import ViT


class Variant(Protocol):
    """The fields of a `Record` that determine the network's shape."""

    @property
    def norm(self) -> str: ...
    @property
    def channels(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def shortcut(self) -> Shortcut: ...
    @property
    def groups(self) -> int: ...


@dataclass(frozen=True)
class Architecture:
    """The norms that a network can have, the default first, and the function that builds it."""

    norms: tuple[str, ...]
    build: Callable[[Variant], nn.Module]


def _resnet20(variant: Variant) -> nn.Module:
    return ResNet20(
        cast(NormName, variant.norm),  # ResNet20 refuses an unknown one
        channels=variant.channels,
        classes=variant.classes,
        shortcut=variant.shortcut,
        groups=variant.groups,
    )


ARCHITECTURES = {
    "resnet20": Architecture(NORMS, _resnet20),
    "vgg": Architecture(("bn",), lambda v: VGG(v.classes, v.channels)),
    "mobilenet": Architecture(("bn",), lambda v: MobileNetV2(v.classes, v.channels, small=True)),
    "convnext": Architecture(("ln",), lambda v: ConvNeXt(v.classes, v.channels)),
    "unet": Architecture(("bn",), lambda v: UNet(v.classes, v.channels)),
    "vit": Architecture(("ln",), lambda v: ViT(v.classes, v.channels)),
}


def find_architecture(name: str) -> Architecture:
    """Return the architecture called `name`.

    >>> find_architecture("convnext").norms
    ('ln',)
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {name!r}; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def check_variant(architecture: str, norm: str) -> None:
    """Raise if the architecture is unknown, or cannot have this norm."""
    known = find_architecture(architecture).norms
    if norm not in known:
        raise ValueError(f"unknown norm {norm!r}; known: {', '.join(known)} (of architecture {architecture})")
