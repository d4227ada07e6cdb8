"""Fold and unfold the batch, for models that turn one image into several rows, such as windows or token groups."""

from __future__ import annotations

from torch import Tensor


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
