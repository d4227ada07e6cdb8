"""The model as trained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trueup import Targets
from trueup.graph import clone
from trueup_lab.evaluation.methods.protocol import Needs, Network


@dataclass(frozen=True)
class Uncorrected:
    """The model as trained."""

    kind = "uncorrected"
    needs = Needs()

    @property
    def name(self) -> str:
        """`uncorrected`."""
        return self.kind

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """Return a clone in evaluation mode."""
        return clone(model).eval()
