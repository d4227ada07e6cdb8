"""The default of `trueup.correct(model, targets)`: the setting that calibration chose for the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trueup import Targets, correct
from trueup_lab.evaluation.methods.protocol import Needs, Network, require


@dataclass(frozen=True)
class Default:
    """The model's own setting, as calibration chose it."""

    kind = "default"
    needs = Needs(targets=True)

    @property
    def name(self) -> str:
        """The kind: it has no options."""
        return self.kind

    def prepare(self, model: nn.Module, targets: Targets | None) -> Network:
        """Return the corrected model."""
        return correct(model, require(self.name, targets))
