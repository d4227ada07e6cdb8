"""TENT: the scales and shifts of batch norm, trained on test images to lower the entropy of predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from trueup import Targets
from trueup_lab.evaluation.methods.bn_batch import without_running_statistics
from trueup_lab.evaluation.methods.entropy import entropy
from trueup_lab.evaluation.methods.norms import with_norms
from trueup_lab.evaluation.methods.protocol import Needs, Network
from trueup_lab.evaluation.methods.spelling import spell

Optimiser = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Tent:
    """Batch statistics, and one step per batch on the mean entropy of its predictions (Wang et al., 2021).

    Where every pixel has a prediction, the mean is over pixels.

    The defaults are the authors' choices for CIFAR-10: Adam at 1e-3 on scales and shifts, batches of 200, and the
    answer from before the step. They reset it before each corruption; `continual` does not. (For ImageNet they use
    `optimiser="sgd"`, momentum 0.9, rate 0.00025 and batches of 64.)

    >>> Tent(continual=True).name
    'tent:continual=True'
    """

    rate: float = 1e-3
    optimiser: Optimiser = "adam"
    continual: bool = False

    kind = "tent"
    needs = Needs(batch_norm=True, batch=True, gradients=True, memory=True)

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"tent: rate={self.rate!r}: expected a learning rate above 0")
        if self.optimiser not in get_args(Optimiser):
            raise ValueError(f"tent: optimiser={self.optimiser!r}: expected one of {', '.join(get_args(Optimiser))}")

    @property
    def name(self) -> str:
        """The kind, and the fields that differ from the defaults."""
        return spell(self)

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """Return a learner that owns copies of the parameters it trains."""
        return Learner(model, self)


class Learner:
    """The network of `Tent`. A call classifies a batch and then learns from it."""

    def __init__(self, model: nn.Module, choices: Tent) -> None:
        self.choices = choices
        self.network = with_norms(model, _trainable)
        norms = [module for module in self.network.modules() if isinstance(module, nn.BatchNorm2d)]
        self.trained = [p for norm in norms for p in (norm.weight, norm.bias) if p is not None]
        if not self.trained:
            raise ValueError(
                "tent trains the scales and shifts of batch norm, and this model has none; use bn-batch instead"
            )
        self._start = [p.detach().clone() for p in self.trained]
        self.reset()

    def reset(self) -> None:
        """Forget everything learned, including the optimiser's moments."""
        with torch.no_grad():
            for parameter, start in zip(self.trained, self._start, strict=True):
                parameter.copy_(start)
        rate = self.choices.rate
        self.optimiser: torch.optim.Optimizer = (
            torch.optim.Adam(self.trained, lr=rate)
            if self.choices.optimiser == "adam"
            else torch.optim.SGD(self.trained, lr=rate, momentum=0.9)
        )

    def __call__(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            logits: Tensor = self.network(x)
            # Not backward(): it would leave gradients on the weights shared with the model.
            gradients = torch.autograd.grad(entropy(logits).mean(), self.trained)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        self.optimiser.step()
        return logits.detach()


def _trainable(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    layer = without_running_statistics(norm)
    if norm.affine:
        layer.weight = nn.Parameter(norm.weight.detach().clone())
        layer.bias = nn.Parameter(norm.bias.detach().clone())
    return layer
