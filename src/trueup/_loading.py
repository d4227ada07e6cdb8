"""Images from a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def images_of(loader: Iterable[Any], device: torch.device | None) -> Iterator[Tensor]:
    """Images of each batch, on the device."""
    if isinstance(loader, Tensor):
        raise TypeError("the loader is a tensor, which would be taken image by image; give [images]")
    return (
        images.detach().to(device) for number, batch in enumerate(loader) if len(images := _images_in(batch, number))
    )


def _images_in(batch: Any, number: int) -> Tensor:
    images = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(images, Tensor) or images.dim() == 0:
        raise TypeError(
            f"batch {number} of the loader is a {type(batch).__name__}: neither a tensor of images nor a tuple or "
            "list that starts with one; pick the images with a generator such as (batch['image'] for batch in loader)"
        )
    return images
