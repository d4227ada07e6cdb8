"""A wrapper that looks like its model to other tools: the model's names and attributes, and `forward` on its class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_OWN = "_inner."  # not "model": many models have a part of that name
# Public names of the wrapper's own submodules and values. A model's attribute of the same name comes first.
_PARTS = {
    "model": "_inner",
    **{name: f"_{name}" for name in ("placed", "placed_at", "readers", "combine", "report", "rule", "sites")},
}


class LikeItsModel(nn.Module):
    """Wraps the model `self._inner` so that other tools treat it like the model itself.

    Parameters, buffers and submodules have the model's names, as in its `state_dict`. Public attributes that this
    module lacks are looked up in the model. `model` is the model itself, and the other names of `_PARTS` say what was
    placed in it, unless the model has an attribute of that name. `_give_forward` sets `forward` on a class made for
    this object alone, as torch.fx does: tools look it up on the class.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("_inner")
            if model is None or name.startswith("_"):
                raise
            own = _PARTS.get(name)
            return getattr(model, name) if own is None or hasattr(model, name) else getattr(self, own)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_modules", {}).get("_inner")
        if name not in _PARTS.values() and model is not None and name in model._modules:
            setattr(model, name, value)
            return
        super().__setattr__(name, value)
        if name == "_inner":  # parameters and buffers at the model's top level
            self.__dict__.update(_parameters=value._parameters, _buffers=value._buffers)

    def __dir__(self) -> list[str]:
        model = self.__dict__.get("_modules", {}).get("_inner")
        public = [] if model is None else [name for name in dir(model) if not name.startswith("_")]
        return sorted({*super().__dir__(), *public, *_PARTS})  # type: ignore[no-untyped-call]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """All modules; those of the model have their names in the model. The model itself shares this module's name."""
        cut = f"{prefix}." if prefix else ""
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            if name == f"{cut}{_OWN}".removesuffix("."):
                yield prefix, module
            elif name.startswith(f"{cut}{_OWN}"):
                yield cut + name.removeprefix(f"{cut}{_OWN}"), module
            else:
                yield name, module

    def _give_forward(self, forward: Callable[..., Any]) -> None:
        """Set `forward(self, ...)` on this object, with the signature of the model's forward."""
        functools.update_wrapper(forward, type(self._inner).forward)
        plain = plain_class(self)
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
        self.__class__ = type(plain.__name__, (plain,), {"forward": forward, "_made_for_one": True, **names})

    def _save_to_state_dict(self, *_: Any) -> None:
        """Save nothing: the model saves its own state."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}{_OWN}{key.removeprefix(prefix)}"] = state.pop(key)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return _empty, (plain_class(self),), self.__getstate__()  # type: ignore[no-untyped-call]

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError(
            "torch.jit.script cannot compile a corrected model, whose forward pass is generated code; use "
            "torch.jit.trace(robust, images), torch.export.export(robust, (images,)) or torch.compile(robust)"
        )


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Class of a module, ignoring the class that `_give_forward` made."""
    cls = type(module)
    return cls.__base__ if "_made_for_one" in cls.__dict__ else cls  # type: ignore[return-value]


def strip_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook of `state_dict`: remove the wrapper's prefix from the model's names."""
    for key in [key for key in state if key.startswith(f"{prefix}{_OWN}")]:
        state[prefix + key.removeprefix(f"{prefix}{_OWN}")] = state.pop(key)


def _empty(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)
