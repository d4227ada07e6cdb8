"""Read published checkpoints into the networks of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from trueup_lab.models.efficientnet_lite import EfficientNetLite
from trueup_lab.models.espnet import ESPNet
from trueup_lab.models.mobilenet_v2 import MobileNetV2
from trueup_lab.models.resnet20 import ResNet20
from trueup_lab.models.resnet50 import ResNet50
from trueup_lab.models.weights import load_weights
from trueup_lab.tensor_files import read_tensors

Weights = Mapping[str, Tensor]
Build = Callable[[Weights, Mapping[str, str]], nn.Module]


def load_public(path: str | os.PathLike[str]) -> nn.Module:
    """Load a published network from a safetensors file, in float32 and `eval` mode.

    A key of the file tells which network it is:

    | key                         | network                                                                        |
    |-----------------------------|--------------------------------------------------------------------------------|
    | `linear.weight`             | ResNet-20 of the widespread CIFAR-10 code with padded shortcuts (here: `fc`)   |
    | `layer4.0.conv3.weight`     | ResNet-50, torchvision's names                                                 |
    | `features.18.0.weight`      | MobileNetV2, torchvision's names                                               |
    | `_blocks.15._bn2.weight`    | EfficientNet-Lite0 to 2, names of the package efficientnet_lite_pytorch        |
    | `encoder.level2_0.c1...`    | ESPNet with its decoder, the authors' names                                    |

    The metadata of a ResNet-50 may hold the convolution that has the stride (`stride`: `3x3` or `1x1`), the norm's
    epsilon (`eps`), and the norm if it is not batch norm (`norm`: `bn`, `gn`, `frn` or `frn-relu`).
    """
    tensors, metadata = read_tensors(path)
    weights = {key: tensor.float() for key, tensor in tensors.items()}
    for mark, build in _BUILDERS.items():
        if mark in weights:
            if mark == "linear.weight":
                weights = {key.replace("linear.", "fc."): tensor for key, tensor in weights.items()}
            try:
                return load_weights(build(weights, metadata), weights).eval()
            except (RuntimeError, KeyError, IndexError, TypeError, ValueError) as error:
                reason = " ".join(str(error).split())[:300]
                raise ValueError(
                    f"{os.fspath(path)} does not hold the network that {mark} stands for: {reason}"
                ) from error
    raise ValueError(
        f"{os.fspath(path)} holds none of the known networks: expected one of the keys {', '.join(_BUILDERS)}; "
        f"its first keys are {', '.join(sorted(weights)[:4])}"
    )


def _resnet20(weights: Weights, _: Mapping[str, str]) -> nn.Module:
    channels, classes = weights["conv1.weight"].shape[1], len(weights["fc.weight"])
    return ResNet20("bn", channels=channels, classes=classes, shortcut="pad")


def _resnet50(weights: Weights, metadata: Mapping[str, str]) -> nn.Module:
    return ResNet50(
        metadata.get("norm", "bn"),  # type: ignore[arg-type]  # ResNet50 refuses an unknown one
        classes=len(weights["fc.weight"]),
        stride_on="1x1" if metadata.get("stride", "3x3") == "1x1" else "3x3",
        eps=float(metadata["eps"]) if "eps" in metadata else None,
    )


def _efficientnet_lite(weights: Weights, _: Mapping[str, str]) -> nn.Module:
    blocks = len({key.split(".")[1] for key in weights if key.startswith("_blocks.")})
    variant = {(16, 320): 0, (21, 320): 1, (21, 352): 2}[blocks, weights["_conv_head.weight"].shape[1]]
    return EfficientNetLite(len(weights["_fc.weight"]), variant=variant)


def _espnet(weights: Weights, _: Mapping[str, str]) -> nn.Module:
    first, second = (
        len({key.split(".")[2] for key in weights if key.startswith(f"encoder.{level}.")})
        for level in ("level2", "level3")
    )
    return ESPNet(len(weights["br.weight"]), (first, second))


_BUILDERS: dict[str, Build] = {
    "linear.weight": _resnet20,
    "layer4.0.conv3.weight": _resnet50,
    "features.18.0.weight": lambda weights, _: MobileNetV2(len(weights["classifier.1.weight"])),
    "_blocks.15._bn2.weight": _efficientnet_lite,
    "encoder.level2_0.c1.conv.weight": _espnet,
}
