"""Copy weights into a network and out of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

COUNTER = "num_batches_tracked"
"""Batch norm's count of training batches. With a fixed momentum, no result depends on it."""


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Copy `weights` into `model`, in its types. All must be there, with the right shapes, except the counters."""
    counters = {key: value for key, value in model.state_dict().items() if key.endswith(COUNTER)}
    model.load_state_dict({**counters, **weights})
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what `load_weights` takes: parameters and running statistics, without the counters."""
    return {key: value for key, value in model.state_dict().items() if not key.endswith(COUNTER)}
