"""What all modules have in common that are placed in a model: how they are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module


class PlacedModule(nn.Module):
    """A module whose call takes little time on the host, and which torch.fx records as one call.

    A model has dozens of them, and on a GPU the host's time counts. Without hooks, gradients and tracers, nothing can
    tell that `forward` is called directly.
    """

    def __call__(self, a: Any, *args: Any, **kwargs: Any) -> Any:
        if type(a) is Tensor:
            if not (
                torch.is_grad_enabled()
                or self._forward_hooks
                or self._forward_pre_hooks
                or torch_module._global_forward_hooks
                or torch_module._global_forward_pre_hooks
                or torch._C._get_tracing_state() is not None
            ):
                return self.forward(a, *args, **kwargs)
        elif isinstance(a, fx.Proxy):
            return self._recorded(a, args, kwargs)
        return super().__call__(a, *args, **kwargs)

    def _recorded(self, a: fx.Proxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        tracer: Any = a.tracer
        given = {
            name: tracer.create_proxy("get_attr", tracer.path_of_module(value), (), {})
            if isinstance(value, nn.Module)
            else value
            for name, value in kwargs.items()
            if name != "source"  # whoever runs the recorded graph may keep any value of it
        }
        found: fx.Proxy = tracer.create_proxy("call_module", tracer.path_of_module(self), (a, *args), given)
        return found
