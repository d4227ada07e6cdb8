"""Turn a loader's batches into a model's inputs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trueup.graph import Inputs, device_of, is_list_of_images, unwrapped

Transform = Callable[[Any], Any]
"""Turns a batch into a model's arguments: one tensor, a tuple of positional or a dictionary of keyword arguments."""

_LABELS = ("label", "labels", "target", "targets", "y")  # entries of a batch that are never a model's input by default
_CHANNELS = (1, 3, 4)  # of a single image
_ADVICE = (
    "say what the model takes with transform=lambda batch: ..., for example transform=lambda batch: batch['image']"
)


def inputs_of(
    loader: Iterable[Any], model: nn.Module, *, transform: Transform | None = None, images: int | None = None
) -> Iterator[Inputs]:
    """Yield the inputs of each batch on the model's device, `images` images in all at most.

    Without `transform`, a batch is a tensor; or a tuple or list that starts with the model's required inputs; or a
    dictionary of inputs by their names; or a list of single images `(channels, height, width)`. A list of one tensor
    with three dimensions is one image if the first is 1, 3 or 4. Labels that follow are not used.
    """
    if isinstance(loader, Tensor):
        raise TypeError("the loader is a tensor, which would be taken image by image; give [images]")
    if isinstance(loader, nn.Module) or not isinstance(loader, Iterable):
        raise TypeError(
            f"the loader is a {type(loader).__name__}: expected a DataLoader, a list of batches, or another iterable "
            "of batches; the model comes first, then the loader"
        )
    if transform is not None and not callable(transform):
        raise TypeError(f"transform={transform!r}: expected a function of a batch; {_ADVICE}")
    if images is not None and (isinstance(images, bool) or not isinstance(images, int) or images < 1):
        raise ValueError(f"images={images!r}: expected a number of images, 1 or more, or None for all")
    return _limited(_all_inputs(loader, model, transform), model, images)


def images_of(loader: Iterable[Any], device: torch.device | None) -> Iterator[Tensor]:
    """Yield the images of each batch, alone or first in a tuple or list, for models that take one tensor."""
    for number, batch in enumerate(loader):
        images = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(images, Tensor) or images.dim() == 0:
            raise TypeError(
                f"batch {number} of the loader is a {type(batch).__name__}: neither a tensor of images nor a tuple or "
                "list that starts with one"
            )
        if len(images):
            yield images.detach().to(device)


def check_finite(inputs: Inputs, number: int) -> None:
    """Raise ValueError if batch `number` of a loader of clean data holds NaN or infinity."""
    if not all(tensor.isfinite().all() for tensor in inputs.tensors):
        raise not_finite(number)


def not_finite(number: int) -> ValueError:
    """Make the error for a batch of clean data that holds NaN or infinity."""
    return ValueError(f"batch {number} of the loader contains NaN or infinity; clean data must be finite")


def _limited(batches: Iterable[Inputs], model: nn.Module, images: int | None) -> Iterator[Inputs]:
    left = images
    for batch in batches:
        found = batch if left is None or len(batch) <= left else batch.part(0, left)
        if len(found):
            yield found.to(device_of(model))
        if left is not None and (left := left - len(found)) <= 0:
            return


def _all_inputs(loader: Iterable[Any], model: nn.Module, transform: Transform | None) -> Iterator[Inputs]:
    signals = False  # whether 3-D tensors are batches; a batch of three signals alone looks like an image
    for number, batch in enumerate(loader):
        signals = signals or _holds_signals(batch)
        yield _arguments(batch, number, model, transform, signals=signals)


def _holds_signals(batch: Any) -> bool:
    """Whether a batch is a list of one 3-D tensor that is no image: `(batch, channels, length)`."""
    return is_list_of_images(batch) and len(batch) == 1 and batch[0].shape[0] not in _CHANNELS


def _arguments(batch: Any, number: int, model: nn.Module, transform: Transform | None, *, signals: bool) -> Inputs:
    inner = unwrapped(model)
    signature = inspect.signature(inner.forward)
    if transform is not None:
        batch = transform(batch)
        inputs = Inputs.of_example(batch)
    elif isinstance(batch, Mapping):
        inputs = _by_name(batch, number, inner, signature)
    elif isinstance(batch, tuple | list) and batch and (signals or not is_list_of_images(batch)):
        inputs = _by_position(batch, number, inner, signature)
    else:
        inputs = Inputs((batch,))
    try:  # positional where possible, so that equal batches have one form
        bound = signature.bind(*inputs.args, **inputs.kwargs)
        inputs = Inputs(bound.args, bound.kwargs)
    except TypeError:
        pass  # the model itself reports what is missing
    _check_inputs(inputs, batch, number, transformed=transform is not None)
    return inputs


def _by_name(batch: Mapping[str, Any], number: int, model: nn.Module, signature: inspect.Signature) -> Inputs:
    kinds = {p.kind for p in signature.parameters.values()}
    entries = {key: value for key, value in batch.items() if key not in _LABELS}
    unknown = [key for key in entries if key not in signature.parameters]
    if len(unknown) == len(entries) and len(signature.parameters) == 1:
        return Inputs((dict(batch),))  # the model takes the dictionary itself
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise TypeError(
            f"batch {number} of the loader has the entries {', '.join(map(repr, batch))}, but the forward pass of "
            f"{type(model).__name__} takes {', '.join(signature.parameters)}, not {unknown[0]!r}; {_ADVICE}"
        )
    return Inputs((), entries)


def _by_position(
    batch: tuple[Any, ...] | list[Any], number: int, model: nn.Module, signature: inspect.Signature
) -> Inputs:
    if isinstance(batch[0], Mapping):
        return _by_name(batch[0], number, model, signature)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in signature.parameters.values() if p.kind in by_place]
    wanted = max(1, sum(p.default is inspect.Parameter.empty for p in places))
    if len(batch) < wanted:
        raise TypeError(
            f"batch {number} of the loader has {len(batch)} entries, but the forward pass of {type(model).__name__} "
            f"takes {', '.join(p.name for p in places[:wanted])}; {_ADVICE}"
        )
    if len(batch) > wanted + 1 and number == 0:
        warnings.warn(
            f"of the {len(batch)} entries of a batch, the first {wanted} go to {type(model).__name__} and the others "
            f"are not used; {_ADVICE}",
            stacklevel=2,
        )
    return Inputs(tuple(batch[:wanted]))


def _check_inputs(inputs: Inputs, batch: Any, number: int, *, transformed: bool) -> None:
    what = (
        f"transform returned, for batch {number} of the loader," if transformed else f"batch {number} of the loader is"
    )
    tensors = inputs.tensors
    if not tensors or all(tensor.dim() == 0 for tensor in tensors):
        raise TypeError(
            f"{what} a {type(batch).__name__}: neither a tensor of images nor a tuple, list or dictionary with one; "
            f"{_ADVICE}"
        )
    if all(tensor.dim() == 1 and not tensor.is_floating_point() for tensor in tensors):
        raise TypeError(
            f"{what} {inputs.describe().removeprefix('images ')}, which look like labels, not images; {_ADVICE}"
        )
