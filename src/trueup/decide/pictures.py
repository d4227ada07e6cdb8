"""Find the pictures among a model's inputs, the tensors that can be perturbed, and perturb all of them.

A picture is a floating-point tensor `(batch, channels, height, width)`, a list of images `(channels, height, width)`,
or a video `(batch, channels, frames, height, width)` or `(batch, frames, channels, height, width)`. A model may have
several: an image and its depth, two frames. Everything else that it takes stays as it is.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.decide.perturb import Scale, perturb
from trueup.graph import Inputs, is_list_of_images, rebuilt
from trueup.targets.file import bytes_of

SMALLEST = 4  # beside other inputs, a picture has at least this many rows and columns; (batch, 1, 1, tokens) is a mask
FLAT = 1e-3  # a picture whose values vary by less than this share of all images' spread is flat
MOST_CHANNELS = 4  # a video has at most this many channels, which tells its channels from its frames

Scales = Mapping[int, Scale]
"""Units of each picture, by its place among the tensors that have an entry per image."""


def kind_of(single: Inputs) -> Hashable:
    """Key that the inputs of two images must share to go into one batch: shapes, types, everything that is shared."""

    def describe(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            shape, kind = tuple(value.shape), str(value.dtype)
            return (shape, kind) if _per_image(value, 1) else (shape, kind, digest(value))
        if is_list_of_images(value) and len(value) == 1:
            return type(value).__name__, tuple(value[0].shape), str(value[0].dtype)
        if isinstance(value, Mapping):
            return tuple((key, describe(part)) for key, part in value.items())
        if isinstance(value, list | tuple):
            return type(value).__name__, tuple(map(describe, value))
        return repr(value)

    return describe(list(single.args)), describe(dict(single.kwargs))


def digest(value: Tensor) -> bytes:
    """Short key of a tensor's values."""
    return hashlib.blake2b(bytes_of(value), digest_size=8).digest()


def together(singles: Sequence[Inputs]) -> Inputs:
    """One batch of several images of one kind."""
    values = [_values(single) for single in singles]
    return _change(singles[0], lambda place, _: torch.cat([each[place] for each in values]))


def largest_image(inputs: Inputs) -> int:
    """Bytes of the largest image of a batch, with everything that belongs to it."""
    if inputs.images is not None:  # all are alike
        return inputs.images[0].nbytes
    return max(sum(tensor.nbytes for tensor in inputs.part(k, k + 1).tensors) for k in range(len(inputs)))


def reason_against(singles: Iterable[Inputs]) -> str | None:
    """The reason why these inputs, of one image each, cannot be perturbed; None if they can."""
    channels: dict[int, set[int]] = {}
    for single in singles:
        if not (pictures := _pictures(single)):
            return (
                f"it takes {_in_words(_values(single))}, and only floating-point images or videos can be perturbed; "
                "pass a rule to correct"
            )
        for place, images in pictures.items():
            channels.setdefault(place, set()).add(images.shape[1])
    if any(len(found) > 1 for found in channels.values()):
        return "its inputs differ in their number of channels, and cannot be perturbed alike; pass a rule to correct"
    return None


def scales_of(batches: Callable[[], Iterable[Inputs]], device: torch.device | None) -> Scales:
    """Measure the units of each picture in batches of clean images.

    A tensor with two values or fewer is taken for a mask, and left alone, if there is another picture. `batches` is
    called several times, so that one batch at a time needs to be in memory.
    """

    def images_at(place: int) -> Iterator[Tensor]:
        return (found[place] for batch in batches() if place in (found := _pictures(batch)))

    places = dict.fromkeys(place for batch in batches() for place in _pictures(batch))
    found = {place: Scale.of_batches(functools.partial(images_at, place)) for place in places}
    masks = {place for place, scale in found.items() if all(_is_mask(images, scale) for images in images_at(place))}
    kept = {place: scale for place, scale in found.items() if place not in masks} or found
    return {place: Scale(*(part.to(device) for part in scale)) for place, scale in kept.items()}


def is_flat(single: Inputs, scales: Scales) -> bool:
    """Whether each picture of an image has hardly more than one colour, compared with all images together."""
    pictures = [(images, scales[place]) for place, images in _pictures(single).items() if place in scales]
    return bool(pictures) and all(
        bool((images.float().std(dim=(2, 3), correction=0) <= FLAT * scale.spread.flatten().to(images.device)).all())
        for images, scale in pictures
    )


def perturb_all(inputs: Inputs, name: str, scales: Scales, *, numbers: Tensor, level: float, seed: int = 0) -> Inputs:
    """Apply one perturbation to all pictures of a batch. Each picture of an image has a draw of its own."""
    order = {place: k for k, place in enumerate(sorted(scales))}

    def change(place: int, value: Tensor) -> Tensor:
        if place not in scales:
            return value
        images = _as_images(value)
        made = perturb(images, name, scales[place], numbers=numbers, level=level, seed=seed * len(order) + order[place])
        return _as_before(made, value)

    return _change(inputs, change)


def _values(inputs: Inputs) -> dict[int, Tensor]:
    """Tensors `(batch, ...)` that have an entry per image, by their place; a list of images is stacked."""
    found: dict[int, Tensor] = {}
    _change(inputs, lambda place, value: found.setdefault(place, value))
    return found


def _pictures(inputs: Inputs) -> dict[int, Tensor]:
    """Pictures among the inputs as images, by their place."""
    values = _values(inputs)
    return {place: _as_images(v) for place, v in values.items() if _is_picture(v, alone=len(values) == 1)}


def _change(inputs: Inputs, function: Callable[[int, Tensor], Tensor]) -> Inputs:
    """Inputs with a function of its place and value applied to each tensor that has an entry per image."""
    change = functools.partial(_changed, count=len(inputs), places=itertools.count(), function=function)
    return Inputs(tuple(map(change, inputs.args)), {key: change(value) for key, value in inputs.kwargs.items()})


# Not a function inside `_change`: one that calls itself is a reference cycle, and would keep the tensors for a while.
def _changed(value: Any, count: int, places: Iterator[int], function: Callable[[int, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(next(places), value) if _per_image(value, count) else value
    if is_list_of_images(value) and len(value) == count:
        return type(value)(function(next(places), torch.stack(list(value))).unbind())
    return rebuilt(value, lambda part: _changed(part, count, places, function))


def _per_image(value: Tensor, count: int) -> bool:
    return value.dim() > 0 and value.shape[0] == count


def _is_picture(value: Tensor, *, alone: bool) -> bool:
    if not value.is_floating_point() or value.dim() not in (4, 5):
        return False
    if value.dim() == 5 and min(value.shape[1:3]) > MOST_CHANNELS:
        return False
    return alone or min(value.shape[-2:]) >= SMALLEST


def _is_mask(images: Tensor, scale: Scale) -> bool:
    return bool(((images == scale.low) | (images == scale.high)).all())


def _as_images(value: Tensor) -> Tensor:
    """A picture as images; the frames of a video are stacked on top of each other."""
    return value if value.dim() == 4 else value.movedim(_channels_at(value), 1).flatten(2, 3)


def _as_before(images: Tensor, value: Tensor) -> Tensor:
    """Undo `_as_images`: give perturbed images the shape of the original picture or video."""
    if value.dim() == 4:
        return images
    at = _channels_at(value)
    return images.reshape(value.movedim(at, 1).shape).movedim(1, at)


def _channels_at(video: Tensor) -> int:
    """Dimension of a video's channels, 1 or 2: three if possible, else the first that may be."""
    first, second = video.shape[1:3]
    return 1 if first == 3 or (second != 3 and first <= MOST_CHANNELS) else 2


def _in_words(values: Mapping[int, Tensor]) -> str:
    return " and ".join(f"{value.dtype} of shape {tuple(value.shape[1:])} per image" for value in values.values())
