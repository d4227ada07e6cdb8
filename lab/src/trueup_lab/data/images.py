"""Sets of images with labels, and the normalisation that turns pixels into a network's input."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Split = Literal["train", "test"]


class Images(NamedTuple):
    """Images and their labels, one byte per pixel and channel."""

    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64; for segmentation (N, H, W) uint8

    def __len__(self) -> int:
        """Return the number of images (not of fields).

        >>> len(Images(torch.zeros(5, 1, 4, 4, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)))
        5
        """
        return self.images.shape[0]

    def first(self, count: int) -> Images:
        """Return the first `count` images."""
        return Images(self.images[:count], self.labels[:count])

    def to(self, device: torch.device | str) -> Images:
        """Return a copy on another device."""
        return Images(self.images.to(device), self.labels.to(device))


class Normalisation(NamedTuple):
    """Normalisation `(pixel / 255 - mean) / std` per channel. It can also put blue first, as some networks expect.

    >>> Normalisation((0.5,), (0.25,))(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-2.,  2.]]]])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    blue_first: bool = False  # mean and std are then those of blue, green, red

    def __call__(self, images: Tensor) -> Tensor:
        """Turn uint8 images (N, C, H, W) into float32 input."""
        channels = images.shape[1]
        if images.dtype != torch.uint8 or channels != len(self.mean):
            raise ValueError(
                f"images are {images.dtype} of shape {tuple(images.shape)}; "
                f"expected uint8 images with {len(self.mean)} channels, (N, {len(self.mean)}, H, W)"
            )
        scale, shift = self.affine(images.device)
        return (images.flip(1) if self.blue_first else images) * scale + shift

    def affine(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return `scale` and `shift`, float32 (1, C, 1, 1), of the equivalent `pixel * scale + shift`."""
        scale = torch.tensor([1 / (255 * s) for s in self.std], device=device)
        shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)], device=device)
        return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The usual one; the public CIFAR-10 ResNet-20 was trained with it too."""

EFFICIENTNET_LITE = Normalisation((127 / 255,) * 3, (128 / 255,) * 3)
"""Of the public EfficientNet-Lite0: (pixel - 127) / 128."""

ESPNET_CAMVID = Normalisation((107.8 / 255, 106.2 / 255, 103.1 / 255), (71.0, 71.6, 68.9), blue_first=True)
"""Of the public ESPNet: (pixel - mean) / deviation, and all of it divided by 255 once more."""

NORMALISATION = {
    "mnist": Normalisation((0.0,), (1.0,)),  # the paper: to [0, 1]
    "digits": Normalisation((0.0,), (1.0,)),
    "cifar10": Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),  # of the training set
    "imagenet": IMAGENET,
    "camvid": ESPNET_CAMVID,
    "scenes": Normalisation((0.49, 0.51, 0.49), (0.20, 0.19, 0.22)),
}
"""Normalisation per data set; corrupted variants use that of their clean set."""
