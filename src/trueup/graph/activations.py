"""The activation functions that are known, each in all its spellings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["activation", "norm"]
Activation = type[nn.Module] | Callable[..., Tensor]


@dataclass(frozen=True)
class Known:
    """An activation function in all its spellings."""

    name: str
    modules: tuple[type[nn.Module], ...]
    functions: tuple[Callable[..., Tensor], ...]
    methods: tuple[str, ...] = ()
    sparse: bool = False


KNOWN = (
    Known("relu", (nn.ReLU,), (F.relu, F.relu_, torch.relu, torch.relu_), ("relu", "relu_"), sparse=True),
    Known("relu6", (nn.ReLU6,), (F.relu6,), sparse=True),
    Known("leaky_relu", (nn.LeakyReLU,), (F.leaky_relu, F.leaky_relu_)),
    Known("prelu", (nn.PReLU,), (F.prelu, torch.prelu), ("prelu",)),
    Known("elu", (nn.ELU,), (F.elu, F.elu_)),
    Known("selu", (nn.SELU,), (F.selu, F.selu_, torch.selu, torch.selu_)),
    Known("celu", (nn.CELU,), (F.celu, F.celu_, torch.celu, torch.celu_)),
    Known("silu", (nn.SiLU,), (F.silu,)),
    Known("mish", (nn.Mish,), (F.mish,)),
    Known("gelu", (nn.GELU,), (F.gelu,)),
    Known("hardswish", (nn.Hardswish,), (F.hardswish,)),
)
KNOWN_MODULES = tuple(module for known in KNOWN for module in known.modules)
KNOWN_FUNCTIONS = {function for known in KNOWN for function in known.functions}


def declared_kind(module: nn.Module) -> Kind | None:
    """The kind of site that a module's class says it is: `trueup_site = True` for an activation, or `"norm"`."""
    declared = getattr(type(module), "trueup_site", False)
    return "activation" if declared is True else "norm" if declared == "norm" else None
