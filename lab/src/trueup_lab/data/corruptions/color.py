"""Brightness, contrast and saturation. HSV is never formed: its changes are scalings of the colour itself."""

from __future__ import annotations

import torch
from torch import Tensor


def brightness(x: Tensor, added: float) -> Tensor:
    """Raise the value of HSV by `added`: a colour keeps its hue and saturation, so all of it scales alike."""
    value = x.amax(1, keepdim=True).float()
    raised = (value + 255 * added).clamp_(max=255)
    return torch.where(value > 0, x * (raised / value), raised)


def contrast(x: Tensor, factor: float) -> Tensor:
    """Move each value towards the mean of its channel."""
    pixels = x.shape[-2] * x.shape[-1]
    mean = x.sum((2, 3), keepdim=True).double().div_(pixels).float()
    return (x - mean) * factor + mean


def saturate(x: Tensor, factor: float, added: float) -> Tensor:
    """Scale the saturation of HSV and add to it. A grey pixel has hue 0, so what is added makes it red."""
    value = x.amax(1, keepdim=True).float()
    chroma = value - x.amin(1, keepdim=True)
    saturation = chroma / value.clamp(min=1)
    changed = (saturation * factor + added).clamp_(0, 1)
    below = (value - x) * (changed / saturation)
    red = torch.tensor([0.0, 1.0, 1.0], device=x.device).view(1, 3, 1, 1)
    return value - torch.where(chroma > 0, below, value * changed * red)
