"""The model as it was trained, the paper's correction, and the rule of evidence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trueup import Correction, Evidence, Targets, correct
from trueup_lab.evaluation.methods.protocol import Needs, Network
from trueup_lab.evaluation.methods.spelling import spell
from trueup.graph import clone


@dataclass(frozen=True)
class Uncorrected:
    """The model as it was trained."""

    kind = "uncorrected"
    needs = Needs()

    @property
    def name(self) -> str:
        """`uncorrected`."""
        return self.kind

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """The model, in evaluation mode."""
        return clone(model).eval()


class _Rule:
    """A rule of `trueup.correct` as a method: its name spells the fields that are not the rule's defaults."""

    kind: str
    needs = Needs(targets=True)

    @property
    def name(self) -> str:
        """The kind, and the fields that are not the defaults."""
        return spell(self)

    def prepare(self, model: nn.Module, targets: Targets | None) -> Network:
        """`trueup.correct`."""
        assert isinstance(self, Correction | Evidence)
        return correct(model, given(self.name, targets), self)


@dataclass(frozen=True)
class Correct(_Rule, Correction):
    """The paper's correction; its fields are those of `trueup.Correction`.

    >>> Correct(lambda1=1.0, lambda2=0.2).name
    'correct:lambda1=1.0,lambda2=0.2'
    """

    kind = "correct"


@dataclass(frozen=True)
class Realign(_Rule, Evidence):
    """Channels moved back in proportion to the evidence of a shift; its fields are those of `trueup.Evidence`.

    >>> Realign(budget=0.02, least=0.0).name
    'evidence:budget=0.02,least=0.0'
    """

    kind = "evidence"


def given(name: str, targets: Targets | None) -> Targets:
    """The targets, for a method that cannot do without."""
    if targets is None:
        raise ValueError(f"{name} needs targets; make them with trueup.calibrate(model, loader)")
    return targets
