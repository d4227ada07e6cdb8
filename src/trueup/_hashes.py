"""Hashes of images. They do not depend on batch, order or process, so copies of an image are recognised anywhere."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trueup._batches import check_finite, not_finite
from trueup.graph import Inputs
from trueup.targets.file import bytes_of

COLUMNS = 32  # a hash reads at least this many columns of an image


def start_hashing(inputs: Inputs, number: int) -> Callable[[], Tensor]:
    """Start copying pixels to the host, and return a function that computes one hash per image `(batch,)` int64.

    A hash covers about 4096 values spread over the image. Images that agree in these values count as copies. The device
    keeps working during the copy; only the returned function waits for it. That may be called in another thread.
    """
    images = inputs.images
    if images is None:
        # Read here and now: in another thread, the device could still be writing them.
        contents = [_content(inputs.part(k, k + 1), number) for k in range(len(inputs))]
        return lambda: _hashes(contents)
    flat = images.reshape(len(images), -1)
    few = flat[:, :: _stride(flat.shape[1], images.shape[-1])].contiguous()
    finite = torch.isfinite(images).all()
    arrived = None
    if images.is_cuda:
        few, finite = (
            torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in (few, finite)
        )
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(images.device))

    def hashes() -> Tensor:
        if arrived is not None:
            arrived.synchronize()
        if not finite:
            raise not_finite(number)
        return _hashes(few.cpu().view(torch.uint8).numpy())

    return hashes


def _stride(values: int, width: int) -> int:
    """Distance of the values of an image that its hash reads, about 4096 of them.

    A distance that has a large divisor in common with the width would read few columns, so it is increased.

    >>> _stride(3 * 224 * 224, 224), _stride(3 * 1024 * 1024, 1024)
    (36, 769)
    """
    stride = max(1, values // 4096)
    while width // math.gcd(stride, width) < min(width, COLUMNS):
        stride += 1
    return stride


def _content(image: Inputs, number: int) -> bytes:
    """Bytes of all tensors of one image."""
    check_finite(image, number)
    return b"".join(map(bytes_of, image.tensors))


def _hashes(contents: Iterable[Any]) -> Tensor:
    digests = [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
    numbers = [int.from_bytes(digest, "big", signed=True) for digest in digests]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
