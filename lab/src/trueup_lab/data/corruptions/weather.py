"""Fog, frost and snow."""

from __future__ import annotations

import torch
from torch import Tensor

from trueup_lab.data.corruptions import linear
from trueup_lab.data.corruptions.frost_textures import textures
from trueup_lab.data.corruptions.motion import motion_blur
from trueup_lab.data.corruptions.plasma import canvas_size, plasma_fractal
from trueup_lab.data.corruptions.rng import ImageRng
from trueup_lab.data.root import DataRoot

_LUMA = (0.299, 0.587, 0.114)  # OpenCV's RGB2GRAY


def fog(x: Tensor, rng: ImageRng, thickness: float, decay: float, *, canvas: int | None = None) -> Tensor:
    """Add a cloud `thickness` times as bright as white, then scale the image's maximum back.

    The cloud is the corner of a square `canvas` pixels wide; None takes the smallest canvas that covers the image.
    """
    height, width = x.shape[-2:]
    cloud = plasma_fractal(rng, 0, canvas or canvas_size(height, width), decay)[:, None, :height, :width]
    brightest = x.amax((1, 2, 3), keepdim=True).float()
    return (x + cloud * (255 * thickness)) * (brightest / (brightest + 255 * thickness))


def frost(x: Tensor, rng: ImageRng, image: float, ice: float, *, scale: float, root: DataRoot = None) -> Tensor:
    """Add `ice` times a random crop of one of five frost textures to `image` times the image."""
    height, width = x.shape[-2:]
    ices = textures(scale, x.device, root, at_least=(height, width))
    which = rng.choice(0, len(ices)).tolist()
    top = rng.choice(1, [ices[k].shape[-2] - height for k in which]).tolist()
    left = rng.choice(2, [ices[k].shape[-1] - width for k in which]).tolist()
    crops = torch.stack([ices[k][:, t : t + height, s : s + width] for k, t, s in zip(which, top, left, strict=True)])
    return x * image + crops * ice


def snow(
    x: Tensor,
    rng: ImageRng,
    mean: float,
    deviation: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Tensor:
    """Add flakes to a paler image: zoomed noise above a threshold, motion-blurred, and the same upside down."""
    height, width = x.shape[-2:]
    noise = rng.normal(0, height * width).view(-1, 1, height, width)
    zoomed = linear.separable(noise, linear.zoom(height, zoom, x.device), linear.zoom(width, zoom, x.device))
    flakes = zoomed * deviation + mean
    flakes = torch.where(flakes < threshold, 0.0, flakes).clamp_(0, 1).mul_(255).floor_()
    angle = rng.fraction(1)[:, 0] * 90 - 135
    fallen = motion_blur(flakes, angle, radius, sigma)
    red, green, blue = x.float().unbind(1)
    grey = (red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]).unsqueeze(1)
    paler = torch.maximum(x.float(), grey * 1.5 + 127.5)
    return x * keep + paler * (1 - keep) + fallen + fallen.flip(-2, -1)
