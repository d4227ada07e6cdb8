"""Make a detector robust as a whole: lists of images of different sizes in, boxes out.

    python examples/torchvision_detection.py --weights DEFAULT

Sites whose rows are proposals, not images, are left alone, and `print(targets)` lists them. What a detector answers
cannot be compared for equality as classes can, so nothing is decided: choose a careful rule yourself.
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
options = parser.parse_args()

model = torchvision.models.get_model(options.model, weights=options.weights, weights_backbone=None).eval()
sizes = [(160, 128), (128, 160)]
pictures = [torch.rand(3, *sizes[k % 2]) for k in range(options.images)]  # your clean images, between 0 and 1
clean_loader = [(pictures[k : k + 4], [{}] * 4) for k in range(0, options.images, 4)]  # as a detection loader has them

targets = trueup.calibrate(model, clean_loader, decide=False)
print(targets)
robust = trueup.correct(model, targets, trueup.Evidence(budget=1.0, strength=0.02, base=0.0))
print(robust)
print([len(found["boxes"]) for found in robust(pictures[:2])])
