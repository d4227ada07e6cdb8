"""The two public networks that some benchmarks share, with images to calibrate and to test on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trueup_lab.data import cifar10
from trueup_lab.data.imagenet import ImageFolder
from trueup_lab.data.images import Images
from trueup_lab.models import load_public

PAPERS = {"resnet20": (1.0, 0.2), "resnet50": (0.5, 0.5)}
"""The paper's step sizes λ₁ and λ₂ for each network's data set."""
FAMILY = {"resnet20": "cifar10-c", "resnet50": "imagenet-c"}


class PublicNetwork(NamedTuple):
    """A trained model, uint8 images to calibrate it on, and other images to test it on."""

    model: nn.Module
    calibration: Tensor
    test: Images


def load_network(name: str, root: Path, *, calibrate: int, test: int) -> PublicNetwork:
    """Load "resnet20" (CIFAR-10) or "resnet50" (ImageNet) from ROOT/weights, with this many images of each kind."""
    if name == "resnet20":
        model = load_public(root / "weights" / "resnet20_cifar10_bn_public.safetensors")
        seen = cifar10.load("train", root).first(calibrate).images
        return PublicNetwork(model, seen, cifar10.load("test", root).first(test))
    model = load_public(root / "weights" / "resnet50_v1_imagenet_bn.safetensors")
    folder = ImageFolder(root / "imagenet_val_1k" / "val")
    # Images are sorted by class, so alternate images serve for the test and for calibration.
    items = [folder[i] for i in range(0, len(folder), 2)[:test]]
    others = torch.stack([folder[i][0] for i in range(1, len(folder), 2)[:calibrate]])
    tested = Images(torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items]))
    return PublicNetwork(model, others, tested)
