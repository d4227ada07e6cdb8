"""Make an image classifier of Hugging Face transformers robust.

    python examples/hugging_face.py --pretrained microsoft/resnet-50

Without `--pretrained`, a small ViT with random weights is made. The loader yields dictionaries, as image processors and
datasets do; entries that are labels are not used.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForImageClassification, ViTConfig

import trueup

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--pretrained", help="name of a model on the hub, which is downloaded")
parser.add_argument("--images", type=int, default=64)
parser.add_argument("--size", type=int, default=32)
options = parser.parse_args()

if options.pretrained:
    model = AutoModelForImageClassification.from_pretrained(options.pretrained)
else:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(image_size=options.size, patch_size=8, num_labels=10, **sizes)
    model = AutoModelForImageClassification.from_config(config)
model.eval()

images = torch.randn(options.images, 3, options.size, options.size)  # what your image processor returns
clean_loader = [{"pixel_values": batch, "labels": torch.zeros(len(batch))} for batch in images.split(16)]

targets = trueup.calibrate(model, clean_loader)
print(targets)
robust = trueup.correct(model, targets)
print(robust)
print(robust(pixel_values=images[:4]).logits.shape)
