"""Weights into a network, and out of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

COUNTER = "num_batches_tracked"
"""Batch norm's count of training batches: no result depends on it while its momentum is a number."""


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Copy `weights` into `model`, in its types; all must be there and fit, but for the counters."""
    counters = {key: value for key, value in model.state_dict().items() if key.endswith(COUNTER)}
    model.load_state_dict({**counters, **weights})
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Everything that `load_weights` takes: parameters and running statistics, without the counters."""
    return {key: value for key, value in model.state_dict().items() if not key.endswith(COUNTER)}
