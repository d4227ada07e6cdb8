"""Make a timm model robust.

    python examples/timm_classification.py --pretrained

Replace `clean_loader` by your own: batches as the model takes them, labels may follow.
"""

from __future__ import annotations

import argparse

import timm
import torch
from torch.utils.data import DataLoader, TensorDataset

import trueup

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="tf_efficientnet_b0")
parser.add_argument("--pretrained", action="store_true", help="download the published weights")
parser.add_argument("--images", type=int, default=256)
parser.add_argument("--size", type=int, default=224)
options = parser.parse_args()

model = timm.create_model(options.model, pretrained=options.pretrained).eval()
images = torch.randn(options.images, 3, options.size, options.size)  # your clean images, normalised as in training
labels = torch.zeros(options.images, dtype=torch.int64)
clean_loader = DataLoader(TensorDataset(images, labels), batch_size=32)

targets = trueup.calibrate(model, clean_loader)
print(targets)  # what was decided for this model, and why
robust = trueup.correct(model, targets)
print(robust)
print(robust(images[:4]).shape)
