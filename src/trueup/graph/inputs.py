"""`Inputs`: one batch as the arguments of a model. Walks over nested inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Inputs:
    """One batch of images: the positional and keyword arguments of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Inputs:
        """Return `Inputs` unchanged; make anything else the only positional argument."""
        return value if isinstance(value, Inputs) else cls((value,))

    @classmethod
    def of_example(cls, value: Any) -> Inputs:
        """Read an example: a tuple of positional, or a dictionary of keyword arguments, or one positional argument."""
        if isinstance(value, Mapping):
            return cls((), dict(value))
        return cls(value) if isinstance(value, tuple) else cls.of(value)

    def __len__(self) -> int:
        return batch_of(*self.args, *self.kwargs.values()) or 0

    @property
    def images(self) -> Tensor | None:
        """The images, if they are one tensor and the only input; else None."""
        alone = len(self.args) == 1 and not self.kwargs
        return self.args[0] if alone and isinstance(self.args[0], Tensor) else None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, including those in lists and dictionaries."""
        return list(tensors_in((self.args, dict(self.kwargs))))

    def to(self, device: torch.device | None, *, copy: bool = False) -> Inputs:
        """Detach all tensors and move them to a device."""
        return self._map(lambda tensor: tensor.detach().to(device, copy=copy))

    def each(self, function: Callable[[Any], Any]) -> Inputs:
        """Apply a function to every argument."""
        return Inputs(tuple(map(function, self.args)), {key: function(value) for key, value in self.kwargs.items()})

    def run(self, module: nn.Module) -> Any:
        """Run a module on a copy of these inputs: a model may write into what it is given."""
        copied = self.to(None, copy=True)
        return module(*copied.args, **copied.kwargs)

    def part(self, start: int, stop: int) -> Inputs:
        """Images `start` to `stop`. Values with one entry per image are cut, everything else is kept."""
        return self._cut(lambda value: value[start:stop])

    def take(self, rows: Tensor) -> Inputs:
        """Images with these indices."""
        numbers = rows.tolist()
        return self._cut(lambda value: value[rows.to(value.device)], lambda value: [value[k] for k in numbers])

    def _cut(self, cut: Callable[[Any], Any], cut_list: Callable[[Any], Any] | None = None) -> Inputs:
        count, of_list = len(self), cut_list or cut

        def walk(value: Any) -> Any:
            if isinstance(value, Tensor):
                return cut(value) if value.dim() and value.shape[0] == count else value
            if is_list_of_images(value) and len(value) == count:
                return type(value)(of_list(value))
            return rebuilt(value, walk)

        return self.each(walk)

    def describe(self) -> str:
        """Shapes and types as text, for messages."""
        if (images := self.images) is not None:
            return f"images of shape {tuple(images.shape)} and type {images.dtype}"
        parts = [_described(value) for value in self.args] + [f"{k}={_described(v)}" for k, v in self.kwargs.items()]
        return f"the inputs ({', '.join(parts)})"

    def _map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        def walk(value: Any) -> Any:
            return function(value) if isinstance(value, Tensor) else rebuilt(value, walk)

        return self.each(walk)


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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in lists, tuples, dictionaries and dataclasses, however nested, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name))


def rebuilt(value: Any, walk: Callable[[Any], Any]) -> Any:
    """Apply `walk` to each entry of a list, tuple or dictionary; return anything else unchanged."""
    if isinstance(value, Mapping):
        return {key: walk(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(walk(part) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(walk(part) for part in value)
    return value


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_described(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}: {_described(value[0]) if value else 'nothing'}"
    return repr(value)
