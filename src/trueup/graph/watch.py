"""Watch a model as it runs: a visitor sees every call of a known norm or activation, and may change its value.

Nothing is traced, so any control flow works. Forward hooks see modules, and a `TorchFunctionMode` sees functions such
as `F.relu`. torch.compile and torch.export trace through both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trueup.graph.cloning import modules_of
from trueup.graph.recognise import TORCH_FUNCTIONS, Known, Numbering
from trueup.graph.tracing import Trace
from trueup.targets import Site

Visit = Callable[[str, Site, Tensor], Tensor | None]
"""Receives a call's name, site (without the call's number) and value; returns a new value, or None to keep it."""


class Watch:
    """Hooks on the modules of `model`. They do nothing unless a pass is being watched in the same thread.

    `trace` says what counts as a site. `functions` watches function calls too, which costs a few microseconds per
    operator. `only` are the names of the sites to show, all by default. Other modules get no hook: without hooks,
    torch's transformer layers take a faster path, which rounds differently.
    """

    def __init__(self, model: nn.Module, trace: Trace, functions: bool, only: Collection[str] | None = None) -> None:
        paths = None if only is None else {name.partition("#")[0] for name in only}
        self._known, self._functions, leaves = Known(trace.activations), functions, trace.leaves
        self._thread = _Thread()
        inside: list[str] = []  # path prefixes of units and leaves
        for path, module in nn.Module.named_modules(model):
            hidden = any(path.startswith(outer) for outer in inside)
            leaf = isinstance(module, leaves)
            unit = self._known.is_unit(module) or (not list(module.children()) and _is_from_torch(module))
            if hidden:
                continue
            if leaf or self._known.is_unit(module):
                inside.append(f"{path}.")
            if functions:
                _move_first(
                    module._forward_pre_hooks, module.register_forward_pre_hook(_Enter(self, path, leaf or unit))
                )
            match = None if leaf or not (paths is None or path in paths) else self._known.module(path, module)
            hook = _Leave(self, functions, None if match is None else match.site)
            if functions or match is not None:
                _move_first(module._forward_hooks, module.register_forward_hook(hook))

    def __call__(self, model: nn.Module, visit: Visit, *args: Any, **kwargs: Any) -> Any:
        """Run and watch the model, or a replica of it with the same hooks."""
        now, before = _WatchedPass(visit), self._thread.now
        self._thread.now = now
        try:
            if not self._functions:
                return model(*args, **kwargs)
            with _Functions(now, self._known):
                return model(*args, **kwargs)
        finally:
            self._thread.now = before

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copied watch is useless: `unwatch` removes its hooks

    def __setstate__(self, _state: dict[str, Any]) -> None:
        self._thread = _Thread()


def unwatch(model: nn.Module) -> None:
    """Remove the hooks of all watches from a model."""
    for module in modules_of(model):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Enter | _Leave)]:
                del hooks[key]


class _Thread(threading.local):
    """The pass that is being watched in each thread."""

    now: _WatchedPass | None = None


class _WatchedPass:
    """One forward pass that is being watched."""

    def __init__(self, visit: Visit) -> None:
        self._visit, self._numbering = visit, Numbering()
        self.callers: list[str | None] = []  # paths of the modules that are running; None inside a unit

    def at(self, site: Site, value: Any, in_place: bool) -> Any:
        """Show a value to the visitor, and return the value with which the model continues."""
        name = self._numbering.name(site.name)
        if not isinstance(value, Tensor):
            return value
        self.callers.append(None)  # calls made by the visitor are not sites
        found = self._visit(name, site, value)
        self.callers.pop()
        if found is None:
            return value
        if in_place and not (value.requires_grad and torch.is_grad_enabled()):
            # Other names may refer to the memory that was written in place. For gradients it must stay as it was.
            return value.copy_(found)
        return found


class _Enter:
    def __init__(self, watch: Watch, path: str, unit: bool) -> None:
        self.watch, self.caller = watch, None if unit else path

    def __call__(self, _module: nn.Module, _args: object) -> None:
        if (now := self.watch._thread.now) is not None:
            inside = bool(now.callers) and now.callers[-1] is None
            now.callers.append(None if inside else self.caller)


class _Leave:
    def __init__(self, watch: Watch, functions: bool, site: Site | None) -> None:
        self.watch, self.functions, self.site = watch, functions, site

    def __call__(self, module: nn.Module, _args: object, out: Any) -> Any:
        if (now := self.watch._thread.now) is None:
            return None
        if self.functions:
            now.callers.pop()
        return None if self.site is None else now.at(self.site, out, getattr(module, "inplace", False) is True)


class _Functions(TorchFunctionMode):
    """Shows calls of known functions to a pass."""

    def __init__(self, now: _WatchedPass, known: Known) -> None:
        super().__init__()
        self._now, self._known = now, known

    def __torch_function__(
        self, func: Any, _types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in TORCH_FUNCTIONS or not self._now.callers or (caller := self._now.callers[-1]) is None:
            return out
        target, in_place = TORCH_FUNCTIONS[func]
        if (match := self._known.function(caller, target, args, kwargs)) is None:
            return out
        flag = match.site.kind == "activation" and any(given is True for given in (*args[1:], kwargs.get("inplace")))
        return self._now.at(match.site, out, in_place or flag)


def _is_from_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _move_first(hooks: Any, handle: Any) -> None:
    """Move a new hook before all others, so that it sees what the module itself computed.

    The others are inserted again. After `move_to_end`, C code that walks an OrderedDict as a plain one, such as
    torch.compile's guards, would see the old order.
    """
    new, others = hooks.pop(handle.id), dict(hooks)
    hooks.clear()
    hooks[handle.id] = new
    hooks.update(others)
