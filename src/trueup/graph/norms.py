"""Known normalisation layers, each in all its spellings.

`Evidence.depth` says which of a model's norms are corrected, and `trueup._correct` applies it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class KnownNorm:
    """A normalisation in all its spellings. `over_last`: it normalises the last dimensions, so channels can be last."""

    name: str
    modules: tuple[type[nn.Module], ...]
    functions: tuple[Callable[..., Tensor], ...]
    over_last: bool = False


KNOWN_NORMS = (
    KnownNorm("batch_norm", (nn.modules.batchnorm._BatchNorm,), (F.batch_norm, torch.batch_norm)),
    KnownNorm("group_norm", (nn.GroupNorm,), (F.group_norm, torch.group_norm)),
    KnownNorm("instance_norm", (nn.modules.instancenorm._InstanceNorm,), (F.instance_norm, torch.instance_norm)),
    KnownNorm("layer_norm", (nn.LayerNorm,), (F.layer_norm, torch.layer_norm), over_last=True),
    KnownNorm("rms_norm", (nn.RMSNorm,), (F.rms_norm, torch.rms_norm), over_last=True),
)
NORM_MODULES = tuple(module for known in KNOWN_NORMS for module in known.modules)


def is_plain_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's norms, a subclass that keeps its forward pass, or a frozen batch norm.

    Every detection library has its own class of frozen batch norms, under the same name.
    """
    if type(module).__name__.endswith("FrozenBatchNorm2d"):
        return True
    return isinstance(module, NORM_MODULES) and type(module).forward.__module__.startswith("torch.nn.")


def channel_dim(known: KnownNorm, shape: Any) -> int | None:
    """Dimension of a norm's channels; None if unclear. A norm over the last dimensions normalises this `shape`.

    >>> layer_norm = KNOWN_NORMS[3]
    >>> channel_dim(layer_norm, (768,)), channel_dim(layer_norm, (64, 8, 8)), channel_dim(layer_norm, (16, 64))
    (-1, 1, None)
    """
    if not known.over_last:
        return 1
    if not isinstance(shape, tuple | list):
        return None
    return {1: -1, 3: 1}.get(len(shape))
