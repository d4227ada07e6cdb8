"""Streams: the order and the batches in which test images arrive."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Stream = Literal["single", "corruption", "mixed", "sorted"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
"""`single`: one image at a time. `corruption`: batches of one corruption, images in random order. `mixed`: batches of
images from all corruptions (of one severity). `sorted`: batches of one corruption, images sorted by class (for
segmentation: in the order of the set, which for a video is that of the drive)."""


def order(stream: Stream, labels: Tensor, *, seed: int = 0) -> Tensor:
    """Return the order in which images with these `labels` `(n,)` arrive: a permutation `(n,)` drawn from `seed`.

    For `mixed`, `labels` are those of all corrupted sets, concatenated.

    >>> labels = torch.tensor([1, 0, 1, 0])
    >>> labels[order("sorted", labels)].tolist()
    [0, 0, 1, 1]
    """
    check_stream(stream)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    if stream == "sorted":
        return shuffled[labels[shuffled].argsort(stable=True)]
    return shuffled


def check_stream(stream: str) -> None:
    """Raise unless `stream` is one of `STREAMS`."""
    if stream not in STREAMS:
        raise ValueError(f"unknown stream {stream!r}; known: {', '.join(STREAMS)}")
