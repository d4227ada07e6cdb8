"""Batch norm with the statistics of the test batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trueup import Targets
from trueup_lab.evaluation.methods.norms import with_norms
from trueup_lab.evaluation.methods.protocol import Needs, Network


@dataclass(frozen=True)
class BatchStatistics:
    """Mean and variance of the test batch (Nado et al., 2020; Schneider et al., 2020, N = 0)."""

    kind = "bn-batch"
    needs = Needs(batch_norm=True, batch=True)

    @property
    def name(self) -> str:
        """`bn-batch`."""
        return self.kind

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """Return a clone without running statistics."""
        return with_norms(model, without_running_statistics)


def without_running_statistics(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """Return a layer that uses the batch's statistics in evaluation mode too. Parameters are shared."""
    layer = nn.BatchNorm2d(norm.num_features, eps=norm.eps, affine=norm.affine, track_running_stats=False)
    layer.weight, layer.bias = norm.weight, norm.bias
    return layer
