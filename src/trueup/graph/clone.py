"""Clones of a model: new module objects around the same tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def clone(model: nn.Module, *, own_buffers: bool = False) -> nn.Module:
    """New module objects around the same parameters and, unless `own_buffers`, the same buffers and other tensors.

    The wrappers of torch.compile and of data-parallel training are removed.
    """
    while inner := _wrapped(model):
        model = inner
    if getattr(model, "is_instrumented", False):
        raise TypeError("this module is a corrected model already; give the model that it was made from")
    memo: dict[int, Tensor] = {id(tensor): tensor for tensor in model.parameters()}
    if own_buffers:  # loose tensors with a history cannot be copied otherwise
        memo |= {id(tensor): tensor.detach().clone() for tensor in loose_tensors(model) if id(tensor) not in memo}
    else:
        memo |= {id(tensor): tensor for tensor in (*loose_tensors(model), *model.buffers())}
    return copy.deepcopy(model, memo)


def device_of(model: nn.Module) -> torch.device | None:
    """Device of a model's first tensor; None for a model without any."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)


def loose_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that are plain attributes, such as the weights that weight norm computes: they cannot be copied."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]


def _wrapped(model: nn.Module) -> nn.Module | None:
    """The model inside the wrapper of torch.compile or of data-parallel training."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner: Any = model.module
    else:
        inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None
