"""MNIST-C's, CIFAR-10-C's and ImageNet-C's corruptions: batched, on CPU or GPU, the same every time.

>>> import torch
>>> images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
>>> noisy = corrupt(images, "gaussian_noise", 3, family="cifar10-c", indices=[7, 4711])
>>> alone = corrupt(images[:1], "gaussian_noise", 3, family="cifar10-c", indices=[4711])
>>> bool((noisy[1] == alone[0]).all())
True
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from trueup_lab.data.corruptions.arithmetic import full_precision
from trueup_lab.data.corruptions.draws import Draws
from trueup_lab.data.corruptions.families import FAMILIES, Family

__all__ = ["GENERATOR", "check", "corrupt", "corruptions", "severities"]

_T = TypeVar("_T")

GENERATOR = 1
"""Version of the generators. It grows whenever any byte that they make changes."""

_CHUNK_CPU = 1 << 20  # values worked on at a time: what fits in a core's cache, and in a GPU's memory
_CHUNK_GPU = 1 << 26


def corrupt(
    images: Tensor,
    name: str,
    severity: int | None = None,
    *,
    family: str,
    indices: Sequence[int] | Tensor | None = None,
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
) -> Tensor:
    """Corrupt `images` (N, C, H, W) uint8 as the benchmark `family` does. The result has the same shape and type.

    `family` is `mnist-c` (1 x 28 x 28), `cifar10-c` (3 x 32 x 32) or `imagenet-c` (3 x H x W; published at 224 x 224,
    for other sizes see docs/corruptions.md). `severity` is 1 to 5; None selects the one that MNIST-C is published at.
    `indices` are the images' numbers in their set (default 0..N-1): what happens to an image depends on its number,
    its size, `seed`, `name` and `severity` only, never on the batch, the order, the thread count or a random state.
    `root` is the data root, which holds frost's textures.
    """
    benchmark = _named(family, FAMILIES, "family")
    _named(name, benchmark.recipes, f"corruption of {family}")
    level, constants = _level(benchmark, name, severity)
    _check_images(images, benchmark)
    numbers = _numbers(indices, len(images))
    recipe = benchmark.recipes[name]
    extra = {"root": root} if name in benchmark.textured else {}
    height, width = images.shape[-2:]
    scratch = benchmark.scratch.get(name, lambda *_: 0)
    work = max(benchmark.channels * height * width, scratch(height, width))
    chunk = max(1, (_CHUNK_GPU if images.is_cuda else _CHUNK_CPU) // work)
    parts = [images[:0]]
    for first in range(0, len(images), chunk):
        part = images[first : first + chunk].contiguous()
        draws = Draws(seed, name, level, numbers[first : first + chunk], images.device)
        with full_precision():
            done = recipe(part, draws, *constants, **extra)
        parts.append(done if done.dtype == torch.uint8 else benchmark.to_bytes(done))
    return torch.cat(parts)


def check(family: str, name: str, severity: int | None) -> int:
    """The severity meant, 0 for a corruption without; an error where there is no such corruption.

    >>> check("mnist-c", "fog", None), check("mnist-c", "fog", 2), check("mnist-c", "stripe", None)
    (5, 2, 0)
    """
    benchmark = _named(family, FAMILIES, "family")
    _named(name, benchmark.recipes, f"corruption of {family}")
    return _level(benchmark, name, severity)[0]


def corruptions(family: str) -> tuple[str, ...]:
    """The names of the corruptions of `family`, as the published files spell them.

    >>> len(corruptions("cifar10-c")), corruptions("mnist-c")[:3]
    (19, ('identity', 'shot_noise', 'impulse_noise'))
    """
    return tuple(_named(family, FAMILIES, "family").recipes)


def severities(family: str, name: str) -> tuple[int, ...]:
    """The severities that `name` can have in `family`: 1 to 5, or none for the corruptions without.

    >>> severities("mnist-c", "fog"), severities("mnist-c", "stripe")
    ((1, 2, 3, 4, 5), ())
    """
    benchmark = _named(family, FAMILIES, "family")
    return tuple(range(1, len(_named(name, benchmark.levels, f"corruption of {family}")) + 1))


def _named(name: str, among: Mapping[str, _T], kind: str) -> _T:
    if name in among:
        return among[name]
    raise ValueError(f"{name!r} is no {kind}{_nearest(name, among)}; there are {', '.join(among)}")


def _nearest(name: str, among: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(among), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _level(family: Family, name: str, severity: int | None) -> tuple[int, tuple[float, ...]]:
    """The severity (0 where there is none) and its constants."""
    levels = family.levels[name]
    if not levels:
        if severity is not None:
            raise ValueError(
                f"{name} of {family.name} has no severities, and severity={severity!r} was asked for; "
                "leave it out or pass severity=None"
            )
        return 0, ()
    chosen = family.published.get(name) if severity is None else severity
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not 1 <= chosen <= len(levels):
        raise ValueError(f"severity={severity!r} for {name} of {family.name}; it is a whole number, 1 to 5")
    return chosen, levels[chosen - 1]


def _check_images(images: Tensor, family: Family) -> None:
    if family.smallest is None:
        wanted = f"{family.name} is made of uint8 images (N, {family.channels}, {family.size}, {family.size})"
    else:
        wanted = (
            f"{family.name} is made of uint8 images (N, {family.channels}, H, W), H and W at least {family.smallest}"
        )
    if not isinstance(images, Tensor):
        raise TypeError(f"images are a {type(images).__name__}; {wanted}, as a torch tensor")
    if images.dtype != torch.uint8:
        raise TypeError(
            f"images are {images.dtype}; {wanted}: corrupt before normalising, "
            "and turn floats in 0..1 into bytes with (images * 255).round().to(torch.uint8)"
        )
    if images.dim() != 4 or images.shape[1] != family.channels or not family.accepts(*images.shape[-2:]):
        raise ValueError(f"images are {tuple(images.shape)}; {wanted}")


def _numbers(indices: Sequence[int] | Tensor | None, count: int) -> Tensor:
    numbers = torch.arange(count) if indices is None else torch.as_tensor(indices)
    if numbers.dtype.is_floating_point or numbers.dtype == torch.bool or numbers.shape != (count,):
        raise ValueError(
            f"indices are {tuple(numbers.shape)} of {numbers.dtype} for {count} images; "
            "they are one whole number an image: its place in the whole set"
        )
    return numbers.to("cpu", torch.int64)
