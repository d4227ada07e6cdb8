"""Accuracy of a model."""

from __future__ import annotations

import torch
from torch import nn

from trueup_lab.data.images import Images, Normalisation


@torch.no_grad()
def share_correct(model: nn.Module, data: Images, normalisation: Normalisation) -> float:
    """Return the share of `data`, images or pixels, that `model` classifies correctly, in evaluation mode and float32.

    `data` must be on the model's device.
    """
    batch = 62 if data.labels.dim() > 1 else 1000  # an answer per pixel takes memory
    training = model.training
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=data.labels.device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for start in range(0, len(data), batch):
            logits = model(normalisation(data.images[start : start + batch]))
            right += (logits.argmax(1) == data.labels[start : start + batch]).sum()
    model.train(training)
    return int(right) / data.labels.numel()
