"""Checkpoints that others published, read into the classes here."""

from __future__ import annotations

import os

from safetensors import safe_open
from torch import Tensor, nn

from trueup_lab.models.resnet20 import ResNet20
from trueup_lab.models.resnet50 import ResNet50
from trueup_lab.models.weights import load_weights


def load_public(path: str | os.PathLike[str]) -> nn.Module:
    """A public ResNet-20 or ResNet-50, from a safetensors file, in float32 and `eval` mode.

    The keys say which: `linear.weight` is ResNet-20's classifier in the widespread CIFAR-10 code with padded
    shortcuts (here `fc`, as in torchvision); `layer4...` is torchvision's ResNet-50. The file's metadata may
    say where the stride is (`stride`: `3x3` or `1x1`), what the norm adds to the variance (`eps`), and which norm
    it is, for a ResNet-50 whose norm is not batch norm (`norm`: `bn`, `gn`, `frn` or `frn-relu`).
    """
    with safe_open(os.fspath(path), framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        weights: dict[str, Tensor] = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
    if "linear.weight" in weights:
        weights = {key.replace("linear.", "fc."): tensor for key, tensor in weights.items()}
        channels = weights["conv1.weight"].shape[1]
        classes = weights["fc.weight"].shape[0]
        model: nn.Module = ResNet20("bn", channels=channels, classes=classes, shortcut="pad")
    elif "layer4.0.conv3.weight" in weights:
        stride = metadata.get("stride", "3x3")
        model = ResNet50(
            metadata.get("norm", "bn"),  # type: ignore[arg-type]  # refused there if it is none
            classes=weights["fc.weight"].shape[0],
            stride_on="1x1" if stride == "1x1" else "3x3",
            eps=float(metadata["eps"]) if "eps" in metadata else None,
        )
    else:
        raise ValueError(
            f"{os.fspath(path)} holds neither a CIFAR-10 ResNet-20 (no 'linear.weight') nor a ResNet-50 "
            f"(no 'layer4.0.conv3.weight'); its first keys are {', '.join(sorted(weights)[:4])}"
        )
    return load_weights(model, weights).eval()
