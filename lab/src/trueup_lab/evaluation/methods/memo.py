"""MEMO: one gradient step per image on the entropy of the mean prediction over augmented views, then a reset."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trueup import Targets
from trueup.graph import clone
from trueup_lab.evaluation.methods.entropy import entropy, log_mean_probability
from trueup_lab.evaluation.methods.protocol import Needs, Network
from trueup_lab.evaluation.methods.spelling import spell
from trueup_lab.evaluation.methods.views import shifted


@dataclass(frozen=True)
class Memo:
    """One step of gradient descent on all parameters for each image (Zhang et al., 2022).

    The authors augment with AugMix; here a view is mirrored (unless `mirror` is False), shifted by up to 1/8 of its
    side, and changed in contrast and brightness by up to 20 %. Every image gets the same draws, so that its answer
    does not depend on other images. `rate` 0.005 and 32 views are the authors' choices for CIFAR-10 (ImageNet:
    rate 0.00025, 64 views).

    >>> Memo(views=64).name
    'memo:views=64'
    """

    rate: float = 0.005
    views: int = 32
    mirror: bool = True

    kind = "memo"
    needs = Needs(gradients=True, views=True)

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"memo: rate={self.rate!r}: expected a learning rate above 0")
        if self.views < 1 or self.views != int(self.views):
            raise ValueError(f"memo: views={self.views!r}: expected a whole number of views, 1 or more")

    @property
    def name(self) -> str:
        """The kind, and the fields that differ from the defaults."""
        return spell(self)

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """Return a function that adapts to each image, classifies it, and forgets it."""
        network = clone(model).eval()
        start = {name: p.detach() for name, p in network.named_parameters()}

        def classify(image: Tensor) -> Tensor:
            with torch.enable_grad():
                parameters = {name: p.clone().requires_grad_(True) for name, p in start.items()}
                logits = functional_call(network, parameters, (self.augment(image),))
                loss = entropy(log_mean_probability(logits[:, None])).sum()
                gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            stepped = {
                name: p if gradient is None else p - self.rate * gradient
                for (name, p), gradient in zip(start.items(), gradients, strict=True)
            }
            with torch.no_grad():
                answer: Tensor = functional_call(network, stepped, (image[None],))
            return answer

        return lambda x: torch.cat([classify(image) for image in x])

    def augment(self, image: Tensor) -> Tensor:
        """Return the views `(views, C, H, W)` of an image `(C, H, W)`."""
        chance = torch.Generator().manual_seed(0)
        furthest = max(1, image.shape[-1] // 8)
        made = []
        for _ in range(int(self.views)):
            down, right = torch.randint(-furthest, furthest + 1, (2,), generator=chance).tolist()
            flip = bool(torch.rand((), generator=chance) < 0.5)
            contrast, brightness = (0.4 * torch.rand(2, generator=chance) - 0.2).tolist()
            view = shifted(image[None], down, right)[0]
            made.append((view.flip(-1) if flip and self.mirror else view) * (1 + contrast) + brightness)
        return torch.stack(made)
