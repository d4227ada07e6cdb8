"""One model to try, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup.graph import Inputs

BATCH = 3


@dataclass(frozen=True)
class ZooCase:
    """One model to try. `make` returns the model, a batch of its inputs, and what the inputs are in words."""

    source: str
    family: str
    model: str
    make: Callable[[], tuple[nn.Module, Inputs, str]]


def noise(*shape: int) -> Tensor:
    """Smooth noise, the same every time."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return made + torch.nn.functional.avg_pool1d(made.flatten(0, -2), 9, 1, 4).reshape(shape) * 3


def images(channels: int, height: int, width: int) -> Inputs:
    """A batch of one tensor."""
    return Inputs((noise(BATCH, channels, height, width),))


def pictures() -> Inputs:
    """A list of images, as detectors take them: of one size, because others are padded to the largest of a batch."""
    return Inputs((list(noise(BATCH, 3, 128, 160).sigmoid()),))
