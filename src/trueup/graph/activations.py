"""Known activation functions, each in all its spellings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup.targets import Kind

Activation = type[nn.Module] | Callable[..., Tensor]


@dataclass(frozen=True)
class KnownActivation:
    """An activation function in all its spellings."""

    name: str
    modules: tuple[type[nn.Module], ...]
    functions: tuple[Callable[..., Tensor], ...]
    methods: tuple[str, ...] = ()
    sparse: bool = False


KNOWN_ACTIVATIONS = (
    KnownActivation("relu", (nn.ReLU,), (F.relu, F.relu_, torch.relu, torch.relu_), ("relu", "relu_"), sparse=True),
    KnownActivation("relu6", (nn.ReLU6,), (F.relu6,), sparse=True),
    KnownActivation("leaky_relu", (nn.LeakyReLU,), (F.leaky_relu, F.leaky_relu_)),
    KnownActivation("prelu", (nn.PReLU,), (F.prelu, torch.prelu), ("prelu",)),
    KnownActivation("elu", (nn.ELU,), (F.elu, F.elu_)),
    KnownActivation("selu", (nn.SELU,), (F.selu, F.selu_, torch.selu, torch.selu_)),
    KnownActivation("celu", (nn.CELU,), (F.celu, F.celu_, torch.celu, torch.celu_)),
    KnownActivation("silu", (nn.SiLU,), (F.silu,)),
    KnownActivation("mish", (nn.Mish,), (F.mish,)),
    KnownActivation("gelu", (nn.GELU,), (F.gelu,)),
    KnownActivation("hardswish", (nn.Hardswish,), (F.hardswish,)),
)
ACTIVATION_MODULES = tuple(module for known in KNOWN_ACTIVATIONS for module in known.modules)
ACTIVATION_FUNCTIONS = {function for known in KNOWN_ACTIVATIONS for function in known.functions}


def declared_kind(module: nn.Module) -> Kind | None:
    """Kind of site that a module's class declares: `trueup_site = True` for an activation, or "norm"."""
    declared = getattr(type(module), "trueup_site", False)
    return "activation" if declared is True else "norm" if declared == "norm" else None
