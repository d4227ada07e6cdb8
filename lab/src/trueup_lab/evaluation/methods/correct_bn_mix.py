"""The paper's correction on top of BN mixing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trueup import Correction, Targets, correct
from trueup_lab.evaluation.methods.bn_mix import check_prior, mixed
from trueup_lab.evaluation.methods.protocol import Needs, Network, require
from trueup_lab.evaluation.methods.spelling import spell


@dataclass(frozen=True)
class CorrectMixed(Correction):
    """The paper's correction of a model with mixed norms. The targets are those of the model as trained.

    >>> CorrectMixed(location="match").name
    'correct+bn-mix:location=match'
    """

    prior: float = 8

    kind = "correct+bn-mix"
    needs = Needs(batch_norm=True, targets=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_prior(self.prior)

    @property
    def name(self) -> str:
        """The kind, and the fields that differ from the defaults."""
        return spell(self)

    def prepare(self, model: nn.Module, targets: Targets | None) -> Network:
        """Return the corrected clone with mixed norms."""
        return correct(mixed(model, self.prior), require(self.name, targets), self)
