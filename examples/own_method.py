"""Evaluate a method of your own with those of trueup, on the same images and in the same tables.

    PYTHONPATH=examples trueup evaluate resnet20-bn-digits \
        --method uncorrected --method own_method:jittered --method own_method:TEMPERATURE

A method has a name, its needs, and `prepare(model, targets)`, which returns a function from images to logits. Decorate
a function with `as_method`, or write a class if the method has settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup import Targets
from trueup_lab.evaluation import Needs, as_method


@as_method("jittered")
def jittered(model: nn.Module, _targets: Targets | None):  # type: ignore[no-untyped-def]
    """Average the predictions for an image and for its copies shifted by one pixel in each direction."""

    def network(x: Tensor) -> Tensor:
        shifted = [x, *(torch.roll(x, step, dims=(2, 3)) for step in ((0, 1), (0, -1), (1, 0), (-1, 0)))]
        return torch.stack([model(s).softmax(dim=1) for s in shifted]).mean(dim=0).log()

    return network


@dataclass(frozen=True)
class Temperature:
    """Soften the predictions: same accuracy, another calibration error."""

    temperature: float
    needs = Needs()

    @property
    def name(self) -> str:
        """Name in tables. It includes every setting that changes the answers."""
        return f"temperature {self.temperature:g}"

    def prepare(self, model: nn.Module, _targets: Targets | None):  # type: ignore[no-untyped-def]
        """Return the model with its logits divided by the temperature."""
        return lambda x: model(x) / self.temperature


TEMPERATURE = Temperature(2.0)
