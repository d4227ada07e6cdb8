"""Training recipes: the paper's numbers, and ours where the paper gives none."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

Optimiser = Literal["sgd", "adamw"]
Schedule = Literal["steps", "cosine"]


@dataclass(frozen=True)
class Recipe:
    """Gradient descent, with a learning rate that falls in steps (the paper's networks) or along a cosine.

    From the paper: `epochs`, `rate`, `decay_after`, the warm-up, the augmentation. Chosen by us, because the paper does
    not give them: `batch`, `momentum` with Nesterov's correction, `weight_decay` on all parameters, and `decay` for
    MNIST and ImageNet.

    The rest is for architectures that the paper does not have. With AdamW, `momentum` is the first beta and
    `second_momentum` the second. `decay_vectors` applies `weight_decay` also to vectors (norms, biases). `mixing` is
    the share of images that are mixed with another one, half of them by a box and half by blending; `erasing` is the
    share in which a box is blanked. No augmentation changes colours, blurs or adds noise, because the models are used
    to measure robustness to exactly that.
    """

    epochs: int
    decay_after: tuple[int, ...] = ()
    rate: float = 0.1
    decay: float = 0.1
    warmup_epochs: int = 0
    warmup_from: float = 0.02
    batch: int = 128
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    crop_padding: int = 0
    mirror: bool = False
    optimiser: Optimiser = "sgd"
    schedule: Schedule = "steps"
    second_momentum: float = 0.999
    decay_vectors: bool = True
    label_smoothing: float = 0.0
    mixing: float = 0.0
    erasing: float = 0.0

    def __post_init__(self) -> None:
        if self.optimiser not in get_args(Optimiser):
            raise ValueError(f"unknown optimiser {self.optimiser!r}; known: {', '.join(get_args(Optimiser))}")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"unknown schedule {self.schedule!r}; known: {', '.join(get_args(Schedule))}")
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected 1 or more")
        for name in ("rate", "warmup_from"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay}: expected 0 or more")
        if not 0 <= self.warmup_epochs <= self.epochs:
            raise ValueError(f"warmup_epochs={self.warmup_epochs}: expected 0 to {self.epochs}, the number of epochs")
        for name in ("momentum", "second_momentum", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected 0 or more, and less than 1")
        for name in ("mixing", "erasing", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a share from 0 to 1")


RECIPES = {
    "mnist": Recipe(epochs=50, decay_after=(25, 40)),
    "cifar10": Recipe(epochs=300, decay_after=(150, 225), crop_padding=4, mirror=True),
    "imagenet": Recipe(epochs=90, decay_after=(30, 60, 80), warmup_epochs=5, batch=256),
    # For the demonstration: takes a minute or two on two cores.
    "digits": Recipe(epochs=16, decay_after=(10, 14), batch=64, crop_padding=2),
}
"""Recipes of the paper's networks: ResNet-50 for ImageNet, ResNet-20 for the other sets."""

_COSINE = Recipe(
    epochs=100,
    schedule="cosine",
    warmup_epochs=5,
    warmup_from=0.01,
    batch=256,
    weight_decay=5e-4,
    crop_padding=4,
    mirror=True,
)
_ADAMW = replace(
    _COSINE,
    optimiser="adamw",
    rate=2e-3,
    warmup_from=1e-5,
    weight_decay=0.05,
    decay_vectors=False,
    label_smoothing=0.1,
)
ARCHITECTURE_RECIPES = {
    ("cifar10", "vgg"): _COSINE,
    ("cifar10", "mobilenet"): _COSINE,
    ("cifar10", "convnext"): replace(_ADAMW, epochs=120, mixing=0.5, erasing=0.25),
    # Attention has no built-in locality and must learn it, from more varied images.
    ("cifar10", "vit"): replace(_ADAMW, epochs=120, rate=1e-3, warmup_epochs=10, mixing=0.8, erasing=0.25),
    # About ten minutes on two cores.
    ("scenes", "unet"): replace(
        _ADAMW, epochs=10, rate=4e-3, batch=16, warmup_epochs=1, crop_padding=0, mirror=False, label_smoothing=0.0
    ),
}
"""Recipes of networks that the paper does not have, by set and architecture."""


def recipe_for(dataset: str, architecture: str = "resnet20") -> Recipe:
    """Return the recipe for training `architecture` on `dataset`.

    >>> recipe_for("cifar10").epochs, recipe_for("cifar10", "vit").optimiser
    (300, 'adamw')
    """
    if (dataset, architecture) in ARCHITECTURE_RECIPES:
        return ARCHITECTURE_RECIPES[dataset, architecture]
    known = [*RECIPES, *(images for images, _ in ARCHITECTURE_RECIPES if images not in RECIPES)]
    if dataset not in known:
        raise ValueError(f"unknown set {dataset!r}; known: {', '.join(known)}")
    if architecture != "resnet20" or dataset not in RECIPES:
        pairs = ", ".join(f"{network} on {images}" for images, network in ARCHITECTURE_RECIPES)
        raise ValueError(f"no recipe for {architecture!r} on {dataset!r}; known besides resnet20's: {pairs}")
    return RECIPES[dataset]


def learning_rate(recipe: Recipe, epoch: int, step: int, steps: int) -> float:
    """Return the learning rate of a step. `epoch` and `step` count from 0; an epoch has `steps`.

    >>> [round(learning_rate(RECIPES["mnist"], epoch, 0, 1), 6) for epoch in (0, 24, 25, 39, 40)]
    [0.1, 0.1, 0.01, 0.01, 0.001]
    >>> [round(learning_rate(RECIPES["imagenet"], epoch, 0, 1), 6) for epoch in (0, 1, 5)]
    [0.02, 0.036, 0.1]
    >>> [round(learning_rate(Recipe(epochs=4, schedule="cosine"), epoch, 0, 1), 6) for epoch in (0, 2, 4)]
    [0.1, 0.05, 0.0]
    """
    progress = epoch + step / steps
    if progress < recipe.warmup_epochs:
        return recipe.warmup_from + (recipe.rate - recipe.warmup_from) * progress / recipe.warmup_epochs
    if recipe.schedule == "cosine":
        part = (progress - recipe.warmup_epochs) / (recipe.epochs - recipe.warmup_epochs)
        return recipe.rate * (1 + math.cos(math.pi * part)) / 2
    return recipe.rate * recipe.decay ** sum(epoch >= after for after in recipe.decay_after)


def shortened(recipe: Recipe, epochs: int) -> Recipe:
    """Scale the recipe to `epochs`. The learning rate falls at the same fractions of the training.

    >>> shortened(RECIPES["cifar10"], 30).decay_after
    (15, 22)
    """
    if epochs < 1:
        raise ValueError(f"epochs={epochs}: expected 1 or more")
    return replace(
        recipe,
        epochs=epochs,
        decay_after=tuple(after * epochs // recipe.epochs for after in recipe.decay_after),
        warmup_epochs=recipe.warmup_epochs * epochs // recipe.epochs,
    )
