"""What a method is: something that turns a trained model into a classifier of test images, and says what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from trueup.targets import Targets

Network = Callable[[Tensor], Tensor]
"""From images, as the model takes them, `(batch, ...)`, to logits `(batch, classes)`."""


@dataclass(frozen=True)
class Needs:
    """What a method asks for beyond the model and one image at a time. Tables show it.

    batch_norm  layers of batch norm in the model
    targets     a calibration on clean images
    batch       other images beside the one to be classified: the answer depends on them
    gradients   a backward pass
    memory      the images that came before: the answer depends on them

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

    @property
    def stateless(self) -> bool:
        """Whether an image's answer is its own: the same in any batch, order and stream."""
        return not (self.batch or self.memory)

    def __str__(self) -> str:
        words = [name.replace("_", " ") for name in self.__dataclass_fields__ if getattr(self, name)]
        return ", ".join(words) or "nothing"


class Method(Protocol):
    """A method. `prepare` must leave the model as it is, and may share its tensors.

    A network with memory has a method `reset()`, which makes it forget: see `Forgetful`. It is called before every
    test set, unless the method has `continual = True`.
    """

    @property
    def name(self) -> str:
        """What rows and tables call it: says every choice that changes its answers."""
        ...

    @property
    def needs(self) -> Needs:
        """What it asks for."""
        ...

    def prepare(self, model: nn.Module, targets: Targets | None) -> Network:
        """The classifier; `targets` are given if the method needs them."""
        ...


@runtime_checkable
class Forgetful(Protocol):
    """A network that can forget what it has seen."""

    def reset(self) -> None:
        """Be as just prepared."""
        ...


@dataclass(frozen=True)
class FunctionMethod:
    """A method from a function. `as_method` makes one."""

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
    """Whether a method's memory is to last from one test set to the next."""
    return method.needs.memory and getattr(method, "continual", False) is True
