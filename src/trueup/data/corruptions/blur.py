"""Blurs that are the same for every image: gaussian, defocus, zoom."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trueup.data.corruptions import linear
from trueup.data.corruptions.arithmetic import WEIGHT_BITS, quantise

_DIRECT = 32  # taps; beyond this a Fourier transform is quicker than shifting and adding


def gaussian_blur(x: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of bytes, edges repeated, cut at four sigma. Float64."""
    return linear.separable(x, linear.gaussian(x.shape[-1], sigma, x.device))


def defocus_blur(x: Tensor, radius: float, alias_blur: float) -> Tensor:
    """Convolve bytes with a disk, mirrored at the border (the edge itself not repeated)."""
    kernel = _disk(radius, alias_blur)
    taps = int((kernel != 0).sum())
    return _shift_and_add(x, kernel) if taps <= _DIRECT else _by_fourier(x, kernel)


def zoom_blur(x: Tensor, stop: float, step: float) -> Tensor:
    """The mean of the image and its zooms by 1, 1 + step, ... below `stop`. Float64."""
    factors = np.arange(1, stop, step).tolist()  # arange, for its own rounding says whether `stop` is in
    across = torch.cat([linear.zoom(x.shape[-1], f, x.device) for f in factors])  # (zooms * n, n)
    n = x.shape[-1]
    wide = x.double() @ across.T  # (..., n, zooms * n)
    total = x.double()
    for k in range(len(factors)):
        total = total + across[k * n : (k + 1) * n] @ wide[..., k * n : (k + 1) * n]
    return total / (len(factors) + 1)


@lru_cache(maxsize=32)
def _disk(radius: float, alias_blur: float) -> Tensor:
    """A disk smoothed by a small gaussian (OpenCV's `GaussianBlur`), trimmed to what is not zero.

    The canvas is 17 wide up to a radius of 8, and the smoothing 3 wide; beyond, 2 r + 1 and 5.
    """
    reach, width = (8, 3) if radius <= 8 else (int(radius), 5)
    at = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (at[:, None] ** 2 + at**2 <= radius**2).double()
    taps = torch.arange(width, dtype=torch.float64) - width // 2
    smooth = torch.exp(-(taps**2) / (2 * alias_blur**2))
    smooth /= smooth.sum()
    padded = F.pad(disk[None, None], (width // 2,) * 4, mode="reflect")
    disk = F.conv2d(F.conv2d(padded, smooth.view(1, 1, 1, -1)), smooth.view(1, 1, -1, 1))[0, 0]
    kernel = quantise((disk / disk.sum()).view(1, -1)).view_as(disk)
    used = (kernel != 0).nonzero()
    edge = min(int(used.min()), 2 * reach - int(used.max()))
    return kernel[edge : len(kernel) - edge, edge : len(kernel) - edge]


def _shift_and_add(x: Tensor, kernel: Tensor) -> Tensor:
    """Exact in float32: a byte times a weight in steps of 2**-16, and their sum, take 24 bits."""
    height, width = x.shape[-2:]
    reach = len(kernel) // 2
    padded = F.pad(x.float(), (reach,) * 4, mode="reflect")
    total = torch.zeros_like(x, dtype=torch.float32)
    for row, col in (kernel != 0).nonzero().tolist():
        total.add_(padded[..., row : row + height, col : col + width], alpha=float(kernel[row, col]))
    return total


def _by_fourier(x: Tensor, kernel: Tensor) -> Tensor:
    """As exact: the true values are multiples of 2**-16, and rounding to those removes the transform's error."""
    height, width = x.shape[-2:]
    reach = len(kernel) // 2
    padded = F.pad(x.double(), (reach,) * 4, mode="reflect")
    shape = [_smooth(side) for side in padded.shape[-2:]]
    spectrum = torch.fft.rfft2(padded, s=shape) * _spectrum(kernel, shape[0], shape[1], x.device)
    full = torch.fft.irfft2(spectrum, s=shape)[..., 2 * reach :, 2 * reach :]
    return (full[..., :height, :width] * 2**WEIGHT_BITS).round_() / 2**WEIGHT_BITS


def _spectrum(kernel: Tensor, height: int, width: int, device: torch.device) -> Tensor:
    # the disk is symmetric, so convolution is correlation
    return torch.fft.rfft2(kernel.to(device), s=[height, width])


def _smooth(size: int) -> int:
    """The next number whose only prime factors are 2, 3 and 5: those transform quickly."""
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 1
