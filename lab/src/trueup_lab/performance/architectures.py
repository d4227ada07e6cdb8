"""The networks whose cost is measured, with random weights, because weights do not change the cost."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trueup_lab import models


@dataclass(frozen=True)
class TimedNetwork:
    """An untrained network whose cost is measured. `make` builds it; those of torchvision need that package."""

    name: str
    make: Callable[[], nn.Module]
    size: int = 224  # height and width of its images
    convolutional: bool = True  # run with channels last in memory

    def build(self, device: torch.device) -> nn.Module:
        """The model in evaluation mode, the same for every call, with batch norm statistics that fit its weights."""
        torch.manual_seed(0)
        return settled(self.make().to(device), self.size)


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        try:
            found = importlib.import_module("torchvision.models")
        except ImportError as error:
            raise ImportError(f"the architecture {name} needs torchvision: pip install torchvision") from error
        model: nn.Module = found.get_model(name, weights=None, **options)
        return model

    return make


def _small_vision_transformer() -> nn.Module:
    try:
        found = importlib.import_module("torchvision.models.vision_transformer")
    except ImportError as error:
        raise ImportError("the architecture ViT-S/16 needs torchvision: pip install torchvision") from error
    model: nn.Module = found.VisionTransformer(
        image_size=224, patch_size=16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    return model


TIMED_NETWORKS = (
    TimedNetwork("ResNet-50", lambda: models.ResNet50("bn")),
    TimedNetwork("MobileNetV2", models.MobileNetV2),
    TimedNetwork("EfficientNet-Lite0", models.EfficientNetLite),
    TimedNetwork("DenseNet-121", _torchvision("densenet121")),
    TimedNetwork("RegNetY-1.6GF", _torchvision("regnet_y_1_6gf")),
    TimedNetwork("ConvNeXt-tiny", _torchvision("convnext_tiny")),
    TimedNetwork("ViT-S/16", _small_vision_transformer, convolutional=False),
    TimedNetwork("Swin-T", _torchvision("swin_t"), convolutional=False),
    TimedNetwork("DeepLabV3-MobileNet", _torchvision("deeplabv3_mobilenet_v3_large", weights_backbone=None)),
    TimedNetwork("ResNet-20", lambda: models.ResNet20("bn"), size=32),
)


def pictures(count: int, size: int, device: torch.device) -> Tensor:
    """Return random images that are smooth at some scales, like photographs."""
    generator = torch.Generator().manual_seed(count)
    coarse = torch.randn(count, 3, size // 8, size // 8, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    return (smooth + 0.3 * torch.randn(count, 3, size, size, generator=generator)).to(device)


@torch.no_grad()
def settled(model: nn.Module, size: int = 224) -> nn.Module:
    """Set the batch norm statistics of an untrained model, so that activations neither vanish nor explode."""
    device = next(model.parameters()).device
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
    model.train()
    model(pictures(32, size, device))
    return model.eval()
