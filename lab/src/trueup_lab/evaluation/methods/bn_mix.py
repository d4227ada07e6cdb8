"""BN mixing: training statistics mixed with those of the single test image."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trueup import Targets
from trueup_lab.evaluation.methods.norms import MixedNorm, with_norms
from trueup_lab.evaluation.methods.protocol import Needs, Network
from trueup_lab.evaluation.methods.spelling import spell


@dataclass(frozen=True)
class Mixed:
    """BN mixing with one image (Schneider et al., 2020, equation 1 with n = 1).

    mean = (N training + image) / (N + 1), and the variance likewise, with N = `prior`.

    >>> Mixed(prior=16).name
    'bn-mix:prior=16'
    """

    prior: float = 8

    kind = "bn-mix"
    needs = Needs(batch_norm=True)

    def __post_init__(self) -> None:
        check_prior(self.prior)

    @property
    def name(self) -> str:
        """The kind, and the prior weight unless it is 8."""
        return spell(self)

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """Return a clone with mixed norms."""
        return mixed(model, self.prior)


def mixed(model: nn.Module, prior: float) -> nn.Module:
    """Return a clone whose batch norms are mixed with prior weight `prior`."""
    return with_norms(model, lambda norm: MixedNorm(norm, 1 / (prior + 1)))


def check_prior(prior: float) -> None:
    """Raise unless `prior` is a weight."""
    if not prior >= 0:  # also refuses NaN
        raise ValueError(f"prior={prior!r}: expected the weight of the training statistics in images, 0 or more")
