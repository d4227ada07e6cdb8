"""Fold and unfold the batch, for models that turn one image into several rows, such as windows or token groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def batch_of(*inputs: Any) -> int | None:
    """Number of images in a model's inputs; None if they hold no tensor.

    The first tensor decides, in lists and dictionaries too. A list of single images `(channels, height, width)` has as
    many images as entries.
    """
    for value in inputs:
        if isinstance(value, Tensor):
            if value.dim():
                return value.shape[0]
            continue
        if isinstance(value, Mapping):
            found = batch_of(*value.values())
        elif is_list_of_images(value):
            return len(value)
        else:
            found = batch_of(*value) if isinstance(value, list | tuple) else None
        if found is not None:
            return found
    return None


def is_list_of_images(value: object) -> bool:
    """Whether `value` is a list or tuple of single images `(channels, height, width)`, as detectors take them."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(image, Tensor) and image.dim() == 3 and image.is_floating_point() for image in value)
    )


def unfold(a: Tensor, batch: int, channel_dim: int | None) -> Tensor:
    """Join all rows of an image: `(batch * n, ...)` becomes `(batch, n * positions, channels)`.

    Without channels (`channel_dim` None) it becomes `(batch, values)`. `a` may be of any number of dimensions.
    """
    if channel_dim is None:
        return a.reshape(batch, -1)
    a = a.movedim(channel_dim, -1)
    return a.reshape(batch, -1, a.shape[-1])


def refold(a: Tensor, like: Tensor, channel_dim: int | None) -> Tensor:
    """Undo `unfold(like, ...)`: bring its rows back to the shape of `like`."""
    if channel_dim is None:
        return a.reshape(like.shape)
    return a.reshape(like.movedim(channel_dim, -1).shape).movedim(-1, channel_dim)
