"""Fog, frost and snow."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from trueup_lab.data.corruptions import linear
from trueup_lab.data.corruptions.draws import Draws
from trueup_lab.data.corruptions.frost import textures
from trueup_lab.data.corruptions.motion import motion_blur
from trueup_lab.data.corruptions.plasma import canvas_size, plasma

Root = str | os.PathLike[str] | None
_LUMA = (0.299, 0.587, 0.114)  # OpenCV's RGB2GRAY


def fog(x: Tensor, draws: Draws, thickness: float, decay: float, *, canvas: int | None = None) -> Tensor:
    """Add a cloud `thickness` times as bright as white, then scale the image's maximum back.

    The cloud is the corner of a square `canvas` pixels wide; None takes the smallest canvas that covers the image.
    """
    height, width = x.shape[-2:]
    cloud = plasma(draws, 0, canvas or canvas_size(height, width), decay)[:, None, :height, :width]
    brightest = x.amax((1, 2, 3), keepdim=True).float()
    return (x + cloud * (255 * thickness)) * (brightest / (brightest + 255 * thickness))


def frost(x: Tensor, draws: Draws, image: float, ice: float, *, scale: float, root: Root = None) -> Tensor:
    """`image` times the image plus `ice` times a random crop of one of the first five frost textures."""
    height, width = x.shape[-2:]
    ices = textures(scale, x.device, root, at_least=(height, width))
    which = draws.choice(0, len(ices)).tolist()
    top = draws.choice(1, [ices[k].shape[-2] - height for k in which]).tolist()
    left = draws.choice(2, [ices[k].shape[-1] - width for k in which]).tolist()
    crops = torch.stack([ices[k][:, t : t + height, s : s + width] for k, t, s in zip(which, top, left, strict=True)])
    return x * image + crops * ice


def snow(
    x: Tensor,
    draws: Draws,
    mean: float,
    deviation: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Tensor:
    """Flakes are zoomed noise over a threshold, blurred by its fall, and again upside down; a paler image."""
    height, width = x.shape[-2:]
    noise = draws.normal(0, height * width).view(-1, 1, height, width)
    zoomed = linear.separable(noise, linear.zoom(height, zoom, x.device), linear.zoom(width, zoom, x.device))
    flakes = zoomed * deviation + mean
    flakes = torch.where(flakes < threshold, 0.0, flakes).clamp_(0, 1).mul_(255).floor_()
    angle = draws.fraction(1)[:, 0] * 90 - 135
    fallen = motion_blur(flakes, angle, radius, sigma)
    red, green, blue = x.float().unbind(1)
    grey = (red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]).unsqueeze(1)
    paler = torch.maximum(x.float(), grey * 1.5 + 127.5)
    return x * keep + paler * (1 - keep) + fallen + fallen.flip(-2, -1)
