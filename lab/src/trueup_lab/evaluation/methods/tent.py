"""TENT: batch norm's scales and shifts learned from the test images, by making predictions less uncertain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from trueup import Targets
from trueup_lab.evaluation.methods.batch_norm import of_batch, with_norms
from trueup_lab.evaluation.methods.protocol import Needs, Network
from trueup_lab.evaluation.methods.spelling import spell

Optimiser = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Tent:
    """Batch statistics, and a step on the entropy of the predictions with every batch (Wang et al., 2021).

    Its authors' choices for CIFAR-10: Adam at 1e-3 on scales and shifts, one step a batch of 200, and the answer is
    the one before the step. They reset it before each corruption; `continual` does not. (For ImageNet they take
    `optimiser="sgd"`, momentum 0.9, at 0.00025 and batches of 64.)

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
            raise ValueError(f"Tent(rate={self.rate!r}): a learning rate is above 0")
        if self.optimiser not in get_args(Optimiser):
            raise ValueError(f"Tent(optimiser={self.optimiser!r}): want one of {', '.join(get_args(Optimiser))}")

    @property
    def name(self) -> str:
        """The fields that are not the defaults."""
        return spell(self)

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """A learner that owns copies of what it trains."""
        return Learner(model, self)


class Learner:
    """What `Tent` prepares. Calling it classifies a batch and learns from it."""

    def __init__(self, model: nn.Module, choices: Tent) -> None:
        self.choices = choices
        self.network = with_norms(model, _trainable)
        norms = [module for module in self.network.modules() if isinstance(module, nn.BatchNorm2d)]
        self.trained = [p for norm in norms for p in (norm.weight, norm.bias) if p is not None]
        if not self.trained:
            raise ValueError("this model's batch norm has no scales and shifts, so there is nothing for TENT to train")
        self._start = [p.detach().clone() for p in self.trained]
        self.reset()

    def reset(self) -> None:
        """Forget everything learned, the optimiser's moments included."""
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
            # Asked for by name: a plain backward() would leave gradients on the weights shared with the model.
            gradients = torch.autograd.grad(entropy(logits).mean(), self.trained)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        self.optimiser.step()
        return logits.detach()


def entropy(logits: Tensor) -> Tensor:
    """The entropy of the predicted distributions `(batch,)`, in nats.

    >>> entropy(torch.zeros(1, 4)).exp()
    tensor([4.])
    """
    log_p = logits.log_softmax(dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)


def _trainable(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    layer = of_batch(norm)
    if norm.affine:
        layer.weight = nn.Parameter(norm.weight.detach().clone())
        layer.bias = nn.Parameter(norm.bias.detach().clone())
    return layer
