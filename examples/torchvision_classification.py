"""Make a torchvision classifier robust, and keep what was learnt in a file.

    python examples/torchvision_classification.py --weights DEFAULT

Replace `clean_loader` by your own: batches as the model takes them, labels may follow.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torchvision
from torch.utils.data import DataLoader, TensorDataset

import trueup

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="mobilenet_v2")
parser.add_argument("--weights", help="such as DEFAULT, which are downloaded")
parser.add_argument("--images", type=int, default=256)
parser.add_argument("--size", type=int, default=224)
options = parser.parse_args()

model = torchvision.models.get_model(options.model, weights=options.weights).eval()
images = torch.randn(options.images, 3, options.size, options.size)  # your clean images, normalised as in training
clean_loader = DataLoader(TensorDataset(images, torch.zeros(options.images)), batch_size=32)

targets = trueup.calibrate(model, clean_loader)
print(targets)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "model.trueup.safetensors"
    targets.save(file)
    robust = trueup.correct(model, trueup.Targets.load(file))
print(robust)
print(robust(images[:4]).shape)
