"""Clones of a model: new module objects around the same tensors."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn

# Methods that torch and this library call on every part of a model, and on the model itself.
_CALLED_ON_PARTS = ("children", "named_children", "named_modules", "state_dict", "train")
_CALLED_ON_MODEL = ("buffers", "eval", "get_submodule", "named_buffers", "named_parameters", "parameters")


def clone(model: nn.Module, *, own_buffers: bool = False) -> nn.Module:
    """Copy the module objects of a model; share its parameters and, unless `own_buffers`, its other tensors.

    The wrappers of torch.compile and of data-parallel training are removed; compiled parts inside run uncompiled.
    """
    model = unwrapped(model)
    check_model_kind(model)
    if getattr(model, "is_instrumented", False):
        raise TypeError("this module is a corrected model already; give the model that it was made from")
    memo: dict[int, Tensor] = {id(tensor): tensor for tensor in model.parameters()}
    if own_buffers:  # deepcopy refuses loose tensors that have a gradient history
        memo |= {id(tensor): tensor.detach().clone() for tensor in loose_tensors(model) if id(tensor) not in memo}
    else:
        memo |= {id(tensor): tensor for tensor in (*loose_tensors(model), *model.buffers())}
    twin = copy.deepcopy(model, memo)
    _share_scripted_parts(model, twin, buffers=not own_buffers)
    for module in modules_of(twin):
        for name, child in module.named_children():
            if (inner := _compiled(child)) is not None:
                module._modules[name] = _Uncompiled(inner)
    return twin


def _share_scripted_parts(model: nn.Module, twin: nn.Module, *, buffers: bool) -> None:
    """Share the tensors of TorchScript parts with the twin; copy.deepcopy ignores the memo for them."""
    for ours, theirs in zip(modules_of(model), modules_of(twin), strict=True):
        if isinstance(ours, torch.jit.ScriptModule):
            shared = [*ours.named_parameters(recurse=False), *(ours.named_buffers(recurse=False) if buffers else ())]
            for name, tensor in shared:
                setattr(theirs, name, tensor)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile and of data-parallel training."""
    while inner := _wrapped(model):
        model = inner
    return model


def check_model_kind(model: object) -> None:
    """Raise an error for an object that is not a model, or a model that cannot be cloned and run."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the model is a {type(model).__name__}: expected a torch.nn.Module as the first argument, as in "
            "calibrate(model, loader) and correct(model, targets)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "the model is a TorchScript module, whose forward pass cannot be changed; give the Python module that it "
            "was scripted or traced from (its weights load with load_state_dict), and script the corrected one"
        )
    _check_names(model)
    if any(base.__name__ == "FSDPModule" for base in type(model).__mro__):
        raise TypeError(
            "the model is sharded by fully_shard, and its weights cannot be shared with a corrected one; calibrate and "
            "correct the model first, before fully_shard"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model has tensors on the meta device, which hold no values; load its weights first, for example with "
            "model.to_empty(device='cpu') and load_state_dict"
        )

    devices = {tensor.device for tensor in model.parameters()}
    if mac := next((device for device in devices if device.type == "mps"), None):
        raise ValueError(
            f"the model lies on {mac}, and Apple's GPUs compute without double precision; use model.to('cpu')"
        )
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters lie on several devices ({', '.join(sorted(map(str, devices)))}); move it to one, "
            "as in model.to('cuda:0')"
        )


def _check_names(model: nn.Module) -> None:
    """Raise TypeError if an attribute of a module hides one of the methods by which torch walks through a model."""
    parts = [("the model", model)]
    while parts:
        name, module = parts.pop()
        methods = _CALLED_ON_PARTS if module is not model else (*_CALLED_ON_PARTS, *_CALLED_ON_MODEL)
        hidden = [method for method in methods if method in (own := vars(module)) and not callable(own[method])]
        if hidden:
            raise TypeError(
                f"{name} ({type(module).__name__}) has an attribute called {hidden[0]!r}, which hides the method "
                f"{hidden[0]}() of torch.nn.Module; rename the attribute"
            )
        prefix = "" if module is model else f"{name}."
        parts += [(f"{prefix}{key}", part) for key, part in module._modules.items() if part is not None]


def device_of(model: nn.Module) -> torch.device | None:
    """Device of a model's first tensor; None for a model without any."""
    return next((tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())), None)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, even if its class redefines `modules`."""
    return [module for _, module in nn.Module.named_modules(model)]


def loose_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that are plain attributes, such as the weights that weight norm computes."""
    return [value for module in modules_of(model) for value in vars(module).values() if isinstance(value, Tensor)]


def _wrapped(model: nn.Module) -> nn.Module | None:
    """The model inside the wrapper of torch.compile or of data-parallel training."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return _compiled(model)


def _compiled(module: object) -> nn.Module | None:
    """The module inside a wrapper of torch.compile."""
    inner: Any = None if isinstance(module, _Uncompiled) else getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


class _Uncompiled(nn.Module):
    """Replaces a compiled part of a model: runs the same module uncompiled, under the same names."""

    _orig_mod: nn.Module

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)
