"""The protocol of a method: it turns a trained model into a classifier of test images, and says what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from trueup import Targets

Network = Callable[[Tensor], Tensor]
"""A function from normalised images `(batch, C, H, W)` to logits `(batch, classes)`, or `(batch, classes, H, W)`."""


@dataclass(frozen=True)
class Needs:
    """Requirements of a method beyond the model and one image at a time. Tables show them.

    batch_norm  the model has batch norm layers
    targets     a calibration on clean images
    batch       other images in the batch, on which the answer depends
    gradients   a backward pass
    memory      the images seen before, on which the answer depends
    views       forward passes over altered copies of the image

    >>> str(Needs(batch_norm=True, batch=True))
    'batch norm, batch'
    >>> str(Needs())
    'nothing'
    """

    batch_norm: bool = False
    targets: bool = False
    batch: bool = False
    gradients: bool = False
    memory: bool = False
    views: bool = False

    @property
    def stateless(self) -> bool:
        """Whether an image gets the same answer in any batch, order and stream."""
        return not (self.batch or self.memory)

    def __str__(self) -> str:
        words = [name.replace("_", " ") for name in self.__dataclass_fields__ if getattr(self, name)]
        return ", ".join(words) or "nothing"


class Method(Protocol):
    """A method. `prepare` must not change the model, and may share its tensors.

    A network with memory implements `Forgetful`; it is reset before every test set, unless the method has
    `continual = True`. A method that needs other source statistics than `Targets` implements `Calibrating`.
    """

    @property
    def name(self) -> str:
        """The name in rows and tables. It includes every setting that changes the answers."""
        ...

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        ...

    def prepare(self, model: nn.Module, targets: Any) -> Network:
        """Return the classifier. `targets` is a `Targets`, or what `calibrate` returned; None if not needed."""
        ...


@runtime_checkable
class Calibrating(Protocol):
    """A method with source statistics of its own, in place of `Targets`."""

    def calibrate(self, model: nn.Module, batches: Iterable[Tensor]) -> object:
        """Return the statistics of clean, normalised images, for `prepare`."""
        ...


@runtime_checkable
class Forgetful(Protocol):
    """A network that can forget what it has seen."""

    def reset(self) -> None:
        """Return to the state right after `prepare`."""
        ...


@dataclass(frozen=True)
class FunctionMethod:
    """A method made from a function by `as_method`."""

    name: str
    needs: Needs
    function: Callable[[nn.Module, Targets | None], Network]

    def prepare(self, model: nn.Module, targets: Targets | None) -> Network:
        """Call the function."""
        return self.function(model, targets)


_NOTHING = Needs()


def as_method(
    name: str, needs: Needs = _NOTHING
) -> Callable[[Callable[[nn.Module, Targets | None], Network]], FunctionMethod]:
    """Turn a function from (model, targets) to a network into a method.

    >>> @as_method("brightened")
    ... def brightened(model, targets):
    ...     return lambda x: model.eval()(x * 1.1)
    >>> brightened.name, str(brightened.needs)
    ('brightened', 'nothing')
    """
    return lambda function: FunctionMethod(name, needs, function)


def is_continual(method: Method) -> bool:
    """Return whether the method's memory lasts from one test set to the next."""
    return method.needs.memory and getattr(method, "continual", False) is True


def require(name: str, targets: Any) -> Any:
    """Return the targets; raise if there are none."""
    if targets is None:
        raise ValueError(
            f"{name} needs targets, got None; make them with trueup.calibrate(model, loader), or with the method's "
            "own calibrate(model, loader) if it has one"
        )
    return targets
