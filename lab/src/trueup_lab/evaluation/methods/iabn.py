"""IABN, the instance-aware batch norm of NOTE, placed in a model that was not trained with it."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup import Targets
from trueup_lab.evaluation.methods.norms import ImageNorm, with_norms
from trueup_lab.evaluation.methods.protocol import Needs, Network
from trueup_lab.evaluation.methods.spelling import spell


@dataclass(frozen=True)
class InstanceAware:
    """Training statistics, moved by the part of the image's deviation that exceeds `k` standard errors.

    Gong et al. (2022), "NOTE". Its authors train with this norm; here it replaces batch norm after training.

    >>> InstanceAware(k=3).name
    'iabn:k=3.0'
    """

    k: float = 4.0

    kind = "iabn"
    needs = Needs(batch_norm=True)

    def __post_init__(self) -> None:
        if not self.k >= 0:
            raise ValueError(f"iabn: k={self.k!r}: expected a number of standard errors, 0 or more")

    @property
    def name(self) -> str:
        """The kind, and `k` unless it is 4."""
        return spell(self)

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """Return a clone with instance-aware norms."""
        return with_norms(model, lambda norm: InstanceAwareNorm(norm, self.k))


class InstanceAwareNorm(ImageNorm):
    """Batch norm with softly shrunk statistics of the image."""

    def __init__(self, norm: nn.BatchNorm2d, k: float) -> None:
        super().__init__(norm)
        self.k = k

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shrink the deviations of the image's mean and unbiased variance; 1 x 1 maps keep the training statistics."""
        mean, var = (s.expand(x.shape[:2]) for s in (self.running_mean, self.running_var))
        pixels = x.shape[2] * x.shape[3]
        if pixels <= 1:
            return mean, var
        own_var, own_mean = torch.var_mean(x, dim=(2, 3), correction=1)
        error_of_mean = torch.sqrt((var + self.eps) / pixels)
        error_of_var = (var + self.eps) * sqrt(2 / (pixels - 1))
        mean = mean + _shrink(own_mean - mean, self.k * error_of_mean)
        return mean, F.relu(var + _shrink(own_var - var, self.k * error_of_var))


def _shrink(deviation: Tensor, threshold: Tensor) -> Tensor:
    return F.relu(deviation - threshold) - F.relu(-deviation - threshold)
