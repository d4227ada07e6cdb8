"""A method of your own beside those of trueup, on the same images, in the same tables.

    PYTHONPATH=examples trueup evaluate resnet20-bn-digits \
        --method uncorrected --method own_method:jittered --method own_method:TEMPERATURE

A method is anything with a name, what it needs, and `prepare(model, targets)`, which returns a function from images to
logits. A function is enough; a class holds its settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup import Targets
from trueup_lab.evaluation import Needs, as_method


@as_method("jittered")
def jittered(model: nn.Module, _targets: Targets | None):  # type: ignore[no-untyped-def]
    """The mean of the predictions for an image and for the same shifted by a pixel each way."""

    def network(x: Tensor) -> Tensor:
        shifted = [x, *(torch.roll(x, step, dims=(2, 3)) for step in ((0, 1), (0, -1), (1, 0), (-1, 0)))]
        return torch.stack([model(s).softmax(dim=1) for s in shifted]).mean(dim=0).log()

    return network


@dataclass(frozen=True)
class Temperature:
    """Softer predictions: no other accuracy, another calibration error."""

    temperature: float
    needs = Needs()

    @property
    def name(self) -> str:
        """Every setting that changes the answers belongs into the name."""
        return f"temperature {self.temperature:g}"

    def prepare(self, model: nn.Module, _targets: Targets | None):  # type: ignore[no-untyped-def]
        """Divide the logits."""
        return lambda x: model(x) / self.temperature


TEMPERATURE = Temperature(2.0)
