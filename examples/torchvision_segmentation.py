"""Make a segmentation model robust: it is decided per pixel what is safe.

python examples/torchvision_segmentation.py --weights DEFAULT
"""

from __future__ import annotations

import argparse

import torch
import torchvision

import trueup

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="lraspp_mobilenet_v3_large")
parser.add_argument("--weights", help="such as DEFAULT, which are downloaded")
parser.add_argument("--images", type=int, default=64)
parser.add_argument("--size", type=int, default=128)
options = parser.parse_args()

model = torchvision.models.get_model(options.model, weights=options.weights, weights_backbone=None).eval()
images = torch.randn(options.images, 3, options.size, options.size)  # your clean images, normalised as in training

targets = trueup.calibrate(model, images.split(8))  # the output is a dictionary; its first scores count
print(targets)
robust = trueup.correct(model, targets)
print(robust)
print(robust(images[:2])["out"].shape)
