"""Correct a model of two inputs: an image and a depth map.

    python examples/two_inputs.py

A loader's batch may be a tuple that starts with the inputs, or a dictionary by their names. If it is anything else,
`transform` turns it into the model's arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import trueup


class RGBD(nn.Module):
    """Two branches that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.colour = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.depth = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, image: Tensor, depth: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores `(batch, 10)`; a mask is optional."""
        joined = self.colour(image) + self.depth(depth)
        if mask is not None:
            joined = joined * mask
        scores: Tensor = self.head(joined.mean((2, 3)))
        return scores


model = RGBD().eval()
images, depths = torch.randn(64, 3, 32, 32), torch.randn(64, 1, 32, 32)
clean_loader = [
    {"sensor": {"rgb": rgb, "range": far}, "id": k}
    for k, (rgb, far) in enumerate(zip(images.split(16), depths.split(16), strict=True))
]

targets = trueup.calibrate(
    model,
    clean_loader,
    transform=lambda batch: {"image": batch["sensor"]["rgb"], "depth": batch["sensor"]["range"]},
    decide=False,  # a decision perturbs the input, and that needs one tensor of images
)
print(targets)
robust = trueup.correct(model, targets, trueup.Evidence(budget=1.0, strength=0.02, base=0.0))
print(robust)
print(robust(images[:4], depths[:4]).shape)
print(robust(image=images[:4], depth=depths[:4], mask=torch.ones(15, 15)).shape)
