"""Recognise sites: the module calls and function calls that are known activations or norms.

`activations` and `norms` list what is known, from ReLU to layer norm. `fusion` recognises the norms that a kernel can
apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from trueup.graph.activations import ACTIVATION_MODULES, KNOWN_ACTIVATIONS, Activation, declared_kind
from trueup.graph.memory import writes_in_place
from trueup.graph.norms import KNOWN_NORMS, channel_dim, is_plain_norm
from trueup.targets import Site


class Match(NamedTuple):
    """A recognised site, named by its path, and the entry of `activations=` that it matches, if any."""

    site: Site
    given: Activation | None = None


class Known:
    """The activations and norms that count as sites: the known ones and those in `activations=`."""

    def __init__(self, activations: tuple[Activation, ...]) -> None:
        self.classes = tuple(a for a in activations if isinstance(a, type))
        self.functions: tuple[Callable[..., Any], ...] = tuple(a for a in activations if not isinstance(a, type))

    def is_unit(self, module: nn.Module) -> bool:
        """Whether a module is one site as a whole, whose inside is not searched."""
        named = isinstance(module, (*self.classes, *ACTIVATION_MODULES))
        return named or is_plain_norm(module) or declared_kind(module) is not None

    def module(self, path: str, module: nn.Module) -> Match | None:
        """Site at a call of the module at this path, or None."""
        # The most derived class: `activations=` may hold a class and its parent.
        if given := [c for c in self.classes if isinstance(module, c)]:
            known_as = max(given, key=lambda c: len(c.__mro__))
            return Match(Site(path, "activation", known_as.__name__, sparse=True), known_as)
        if (kind := declared_kind(module)) is not None:
            return Match(Site(path, kind, type(module).__name__))
        for known in KNOWN_ACTIVATIONS:
            if isinstance(module, known.modules):
                return Match(Site(path, "activation", known.name, known.sparse))
        if not is_plain_norm(module):
            return None
        shape = getattr(module, "normalized_shape", None)
        frozen = KNOWN_NORMS[0]  # a frozen batch norm is no subclass of torch's
        norm = next((n for n in KNOWN_NORMS if isinstance(module, n.modules)), frozen)
        dim = channel_dim(norm, shape)
        return None if dim is None else Match(Site(path, "norm", norm.name, channel_dim=dim))

    def function(self, caller: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Match | None:
        """Site at a call of a function, or of a method by its name, from the module at the path `caller`; or None.

        `args` and `kwargs` are the call's arguments.
        """
        activation = _METHODS.get(target) if isinstance(target, str) else _hashed(_FUNCTIONS, target)
        if activation is not None:
            return Match(Site(_join(caller, activation.name), "activation", activation.name, activation.sparse))
        for function in self.functions:
            if target is function:
                name = function.__name__
                return Match(Site(_join(caller, name), "activation", name, sparse=True), function)
        if (norm := _hashed(_NORM_FUNCTIONS, target)) is not None:
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
            if (dim := channel_dim(norm, shape)) is not None:
                return Match(Site(_join(caller, norm.name), "norm", norm.name, channel_dim=dim))
        return None


class Numbering:
    """Numbers the calls of one forward pass: the second call at a path is named `path#2`."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}

    def name(self, path: str) -> str:
        """Name of the next call at this path."""
        calls = self._calls[path] = self._calls.get(path, 0) + 1
        return path if calls == 1 else f"{path}#{calls}"

    def site(self, site: Site) -> Site:
        """Return the site under the name of its call."""
        name = self.name(site.name)
        return site if name == site.name else replace(site, name=name)


_FUNCTIONS = {function: known for known in KNOWN_ACTIVATIONS for function in known.functions}
_METHODS = {method: known for known in KNOWN_ACTIVATIONS for method in known.methods}
_NORM_FUNCTIONS = {function: known for known in KNOWN_NORMS for function in known.functions}
# Keys are what `__torch_function__` receives: methods are functions of the Tensor class. The flag says that a function
# always writes in place: torch.compile cannot read that from its name.
TORCH_FUNCTIONS: dict[Any, tuple[Any, bool]] = {
    **{function: (function, writes_in_place(function, (), {})) for function in (*_FUNCTIONS, *_NORM_FUNCTIONS)},
    **{getattr(Tensor, method): (method, writes_in_place(method, (), {})) for method in _METHODS},
}


def _hashed(table: Mapping[Any, Any], key: Any) -> Any:
    try:
        return table.get(key)
    except TypeError:  # not hashable
        return None


def _join(caller: str, name: str) -> str:
    return f"{caller}.{name}" if caller else name
