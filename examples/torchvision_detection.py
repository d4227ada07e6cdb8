"""Make a detector robust as a whole: lists of images of different sizes in, boxes out.

    python examples/torchvision_detection.py --weights DEFAULT

Sites whose rows are proposals, not images, are left alone, and `print(targets)` lists them. What is safe is decided by
the answers of the model: `classes_seen` says what counts as one, here the set of classes that are seen in an image.
"""

from __future__ import annotations

import argparse

import torch
import torchvision

import trueup

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="fasterrcnn_mobilenet_v3_large_320_fpn")
parser.add_argument("--weights", help="such as DEFAULT, which are downloaded")
parser.add_argument("--images", type=int, default=64)
parser.add_argument("--size", type=int, default=320, help="shorter side to which the model scales images")
options = parser.parse_args()

model = torchvision.models.get_model(
    options.model, weights=options.weights, weights_backbone=None, min_size=options.size
).eval()
sizes = [(160, 128), (128, 160)]
pictures = [torch.rand(3, *sizes[k % 2]) for k in range(options.images)]  # your clean images, between 0 and 1
clean_loader = [(pictures[k : k + 4], [{}] * 4) for k in range(0, options.images, 4)]  # as a detection loader has them


def classes_seen(found: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """A number for the set of classes in each image."""
    return torch.tensor([hash(frozenset(each["labels"][each["scores"] > 0.5].tolist())) for each in found])


targets = trueup.calibrate(model, clean_loader, answer=classes_seen)
print(targets)
robust = trueup.correct(model, targets)
print(robust)
print([len(found["boxes"]) for found in robust(pictures[:2])])
