"""Keep torch.fx out of a placed module: it records a call of the module and does not enter it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, fx, nn

Forward = TypeVar("Forward", bound=Callable[..., Any])


def leaf(forward: Forward) -> Forward:
    """Decorate a placed module's forward so that torch.fx records a call of the module and does not enter it."""

    @functools.wraps(forward)
    def call(self: nn.Module, a: Any, *args: Any, **kwargs: Any) -> Any:
        if type(a) is not Tensor and isinstance(a, fx.Proxy):
            tracer: Any = a.tracer
            given = {
                name: tracer.create_proxy("get_attr", tracer.path_of_module(value), (), {})
                if isinstance(value, nn.Module)
                else value
                for name, value in kwargs.items()
                if name != "source"  # whoever runs the recorded graph may keep any value of it
            }
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (a, *args), given)
        return forward(self, a, *args, **kwargs)

    return call  # type: ignore[return-value]
