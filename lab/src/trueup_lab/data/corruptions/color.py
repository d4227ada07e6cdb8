"""Brightness, contrast and saturation, computed in RGB: each change in HSV is a scaling of the colour."""

from __future__ import annotations

import torch
from torch import Tensor


def brightness(x: Tensor, added: float) -> Tensor:
    """Raise the V of HSV by `added`. Hue and saturation stay, so all channels are scaled alike."""
    value = x.amax(1, keepdim=True).float()
    raised = (value + 255 * added).clamp_(max=255)
    return torch.where(value > 0, x * (raised / value), raised)


def contrast(x: Tensor, factor: float) -> Tensor:
    """Move each value towards its channel's mean: 1 leaves the image alone, 0 gives the mean."""
    pixels = x.shape[-2] * x.shape[-1]
    mean = x.sum((2, 3), keepdim=True).double().div_(pixels).float()
    return (x - mean) * factor + mean


def saturate(x: Tensor, factor: float, added: float) -> Tensor:
    """Scale the S of HSV by `factor` and add `added`. Grey pixels have hue 0, so `added` turns them red."""
    value = x.amax(1, keepdim=True).float()
    chroma = value - x.amin(1, keepdim=True)
    saturation = chroma / value.clamp(min=1)
    changed = (saturation * factor + added).clamp_(0, 1)
    below = (value - x) * (changed / saturation)
    red = torch.tensor([0.0, 1.0, 1.0], device=x.device).view(1, 3, 1, 1)
    return value - torch.where(chroma > 0, below, value * changed * red)
