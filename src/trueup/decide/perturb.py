"""Generic perturbations of a model's input tensors, whatever their normalisation, size or number of channels.

They stand in for the unknown shifts of a deployment: random noise of any spectrum, random small filters, random tone
curves, mixed channels and patches, each drawn with as little structure as possible (in the spirit of PRIME, Modas et
al., 2022). None copies a benchmark's corruption. Everything is relative to the range and the spread that the clean
images themselves have, and every image's draw depends only on its number and the seed. `trueup.decide.search` chooses
the levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Scale(NamedTuple):
    """Units of the input: per channel, the spread and the range of clean images `(1, channels, 1, 1)`."""

    spread: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of_batches(cls, batches: Callable[[], Iterable[Tensor]]) -> Scale:
        """Measure batches of clean images `(n, channels, height, width)`, of any sizes.

        `batches` is called twice, so that one batch at a time needs to be in memory.
        """

        def flat() -> Iterator[Tensor]:
            return (images.transpose(0, 1).flatten(1).double() for images in batches())

        parts = [(part.sum(1), part.amin(1), part.amax(1), part.shape[1]) for part in flat()]
        sums, lows, highs = (torch.stack(column) for column in list(zip(*parts, strict=True))[:3])
        count = sum(part[3] for part in parts)
        mean = sums.sum(0) / count
        square = torch.stack([(part - mean[:, None]).square().sum(1) for part in flat()]).sum(0) / count
        return cls(*(part.float().view(1, -1, 1, 1) for part in (square.sqrt(), lows.amin(0), highs.amax(0))))


class Draw:
    """Random numbers of a batch. An image's depend on its number and the seed alone, whatever the perturbation."""

    def __init__(self, numbers: Tensor, seed: int, device: torch.device) -> None:
        self._generators = [torch.Generator().manual_seed(1_000_003 * seed + int(n)) for n in numbers]
        self._device = device

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers `(batch, *shape)`."""
        return torch.stack(
            [torch.randn(*shape, generator=g, dtype=torch.float32, device="cpu") for g in self._generators]
        ).to(self._device)

    def uniform(self, low: float, high: float) -> Tensor:
        """One number per image `(batch, 1, 1, 1)`."""
        drawn = torch.stack(
            [torch.rand(1, 1, 1, generator=g, dtype=torch.float32, device="cpu") for g in self._generators]
        ).to(self._device)
        return low + (high - low) * drawn


Perturbation = Callable[[Tensor, Draw, Scale, float], Tensor]


def noise(x: Tensor, draw: Draw, scale: Scale, level: float) -> Tensor:
    """Add Gaussian noise with a random spectral slope, from white to 1/f."""
    spectrum = torch.fft.rfft2(draw.normal(*x.shape[1:]))
    radius = _radius(*x.shape[2:], device=x.device)
    slope = draw.uniform(0.0, 1.0)
    field = torch.fft.irfft2(spectrum * radius**-slope, s=x.shape[2:])
    return x + level * 0.5 * scale.spread * _standardised(field)


def speckle(x: Tensor, draw: Draw, scale: Scale, level: float) -> Tensor:
    """Multiply by noise: bright pixels get more of it."""
    return x + level * 0.6 * draw.normal(*x.shape[1:]) * (x - scale.low)


def smooth(x: Tensor, draw: Draw, _scale: Scale, level: float) -> Tensor:
    """Average with random positive weights over a window, twice if the window is large enough to be split.

    Random weights have a flat spectrum, so one pass leaves part of the finest detail. Two leave almost none, as lenses
    do.
    """
    smallest = min(x.shape[2:])
    reach = max(1, round(level * 0.018 * smallest + level))
    for half in ((reach + 1) // 2, reach // 2):
        side = 2 * min(half, smallest - 1) + 1  # reflection needs smaller windows than the image
        weights = draw.normal(side * side).softmax(dim=1)
        x = _filtered(x, weights.view(-1, side, side))
    return x


def sharpen(x: Tensor, draw: Draw, _scale: Scale, level: float) -> Tensor:
    """Convolve with the identity plus a random 3 x 3 filter of zero sum."""
    weights = draw.normal(9)
    weights = level * 0.35 * (weights - weights.mean(dim=1, keepdim=True))
    weights[:, 4] += 1
    return _filtered(x, weights.view(-1, 3, 3))


def tone(x: Tensor, draw: Draw, scale: Scale, level: float) -> Tensor:
    """Apply a random smooth curve to the intensities, mostly the same for all channels."""
    span = (scale.high - scale.low).clamp(min=1e-12)
    value = (x - scale.low) / span
    shared, own = draw.normal(4, 1), draw.normal(4, x.shape[1])
    for k in range(4):
        gain = level * 0.15 * (0.9 * shared[:, k] + 0.4 * own[:, k])[..., None, None] / math.sqrt(k + 1)
        value = value + gain * torch.sin((k + 1) * math.pi * ((x - scale.low) / span))
    return scale.low + span * value


def mix_channels(x: Tensor, draw: Draw, scale: Scale, level: float) -> Tensor:
    """Mix channels by a random matrix near the identity (saturation and hue); with one channel, apply a tone curve."""
    if x.shape[1] == 1:
        return tone(x, draw, scale, level)
    channels = x.shape[1]
    centre, spread = (scale.low + scale.high) / 2, scale.spread.clamp(min=1e-12)
    matrix = torch.eye(channels, dtype=x.dtype, device=x.device) + level * 0.3 * draw.normal(channels, channels)
    mixed = torch.einsum("bij,bjhw->bihw", matrix, (x - centre) / spread)
    return centre + spread * mixed


def patches(x: Tensor, draw: Draw, scale: Scale, level: float) -> Tensor:
    """Cover random smooth patches with a random colour."""
    coarse = draw.normal(1, max(2, x.shape[2] // 8), max(2, x.shape[3] // 8))
    field = F.interpolate(coarse, size=x.shape[2:], mode="bilinear", align_corners=False)
    mask = torch.sigmoid(8 * (_standardised(field) - (1.8 - 0.4 * level)))
    colour = scale.low + (scale.high - scale.low) * torch.special.ndtr(draw.normal(x.shape[1], 1, 1))
    return torch.lerp(x, colour.expand_as(x), mask)


PERTURBATIONS: dict[str, Perturbation] = {
    "noise": noise,
    "speckle": speckle,
    "smooth": smooth,
    "sharpen": sharpen,
    "tone": tone,
    "mix_channels": mix_channels,
    "patches": patches,
}


def perturb(images: Tensor, name: str, scale: Scale, *, numbers: Tensor, level: float = 1.0, seed: int = 0) -> Tensor:
    """Apply one perturbation to `images` `(batch, channels, height, width)` and clip to the range of clean images."""
    wide = images.float()
    out = PERTURBATIONS[name](wide, Draw(numbers, seed, images.device), scale, level)
    clipped: Tensor = out.clamp(scale.low, scale.high).to(images.dtype)
    return clipped


def _radius(height: int, width: int, *, device: torch.device) -> Tensor:
    """Spatial frequency of each coefficient of `rfft2`, at least one period per image."""
    rows = torch.fft.fftfreq(height, dtype=torch.float32, device=device)[:, None] * height
    columns = torch.fft.rfftfreq(width, dtype=torch.float32, device=device)[None, :] * width
    radius: Tensor = (rows.square() + columns.square()).sqrt().clamp(min=1.0)
    return radius


def _standardised(field: Tensor) -> Tensor:
    field = field - field.mean(dim=(2, 3), keepdim=True)
    return field / field.square().mean(dim=(2, 3), keepdim=True).sqrt().clamp(min=1e-12)


def _filtered(x: Tensor, weights: Tensor) -> Tensor:
    """Convolve all channels of image b with `weights[b]` `(side, side)`, reflecting at the border."""
    batch, channels, height, width = x.shape
    half = min(weights.shape[1] // 2, height - 1, width - 1)
    side = 2 * half + 1
    first = (weights.shape[1] - side) // 2
    kernel = weights[:, first : first + side, first : first + side]
    padded = F.pad(x, (half, half, half, half), mode="reflect")
    grouped = padded.reshape(1, batch * channels, *padded.shape[2:])
    kernel = kernel.repeat_interleave(channels, dim=0)[:, None]
    return F.conv2d(grouped, kernel, groups=batch * channels).view(batch, channels, height, width)
