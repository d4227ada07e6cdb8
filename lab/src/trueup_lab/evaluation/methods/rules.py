"""The rules of `trueup.correct` as methods: the paper's correction, and the rule of evidence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trueup import Correction, Evidence, Targets, correct
from trueup_lab.evaluation.methods.protocol import Needs, Network, require
from trueup_lab.evaluation.methods.spelling import spell


class _RuleMethod:
    kind: str
    needs = Needs(targets=True)

    @property
    def name(self) -> str:
        """The kind, and the fields that differ from the defaults."""
        return spell(self)

    def prepare(self, model: nn.Module, targets: Targets | None) -> Network:
        """Return the corrected model."""
        assert isinstance(self, Correction | Evidence)
        return correct(model, require(self.name, targets), self)


@dataclass(frozen=True)
class Correct(_RuleMethod, Correction):
    """The paper's correction, with the fields of `trueup.Correction`.

    >>> Correct(lambda1=1.0, lambda2=0.2).name
    'correct:lambda1=1.0,lambda2=0.2'
    """

    kind = "correct"


@dataclass(frozen=True)
class Realign(_RuleMethod, Evidence):
    """The rule of evidence, with the fields of `trueup.Evidence`.

    >>> Realign(budget=0.02, least=0.0).name
    'evidence:budget=0.02,least=0.0'
    >>> Realign(depth=1, counts=(0.5, 0.5, 1.0)).name
    'evidence:depth=1.0,counts=0.5/0.5/1.0'
    """

    kind = "evidence"
