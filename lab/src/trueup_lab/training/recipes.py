"""How each set is trained. The paper's numbers, and our choices where it says nothing, each named."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Recipe:
    """Stochastic gradient descent with a learning rate that falls in steps.

    From the paper: `epochs`, `rate`, `decay_after`, the warm-up, the augmentation. Chosen here, because
    it does not say: `batch`, `momentum` with Nesterov's correction, `weight_decay` on all
    parameters, and `decay` where it is not given (MNIST, ImageNet).
    """

    epochs: int
    decay_after: tuple[int, ...]
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


RECIPES = {
    "mnist": Recipe(epochs=50, decay_after=(25, 40)),
    "cifar10": Recipe(epochs=300, decay_after=(150, 225), crop_padding=4, mirror=True),
    "imagenet": Recipe(epochs=90, decay_after=(30, 60, 80), warmup_epochs=5, batch=256),
    # For the demonstration: a minute or two on two cores.
    "digits": Recipe(epochs=16, decay_after=(10, 14), batch=64, crop_padding=2),
}


def learning_rate(recipe: Recipe, epoch: int, step: int, steps: int) -> float:
    """The rate of `step` (from 0, of `steps` an epoch) in `epoch` (from 0).

    >>> [round(learning_rate(RECIPES["mnist"], epoch, 0, 1), 6) for epoch in (0, 24, 25, 39, 40)]
    [0.1, 0.1, 0.01, 0.01, 0.001]
    >>> [round(learning_rate(RECIPES["imagenet"], epoch, 0, 1), 6) for epoch in (0, 1, 5)]
    [0.02, 0.036, 0.1]
    """
    progress = epoch + step / steps
    if progress < recipe.warmup_epochs:
        return recipe.warmup_from + (recipe.rate - recipe.warmup_from) * progress / recipe.warmup_epochs
    return recipe.rate * recipe.decay ** sum(epoch >= after for after in recipe.decay_after)


def shortened(recipe: Recipe, epochs: int) -> Recipe:
    """The recipe squeezed or stretched to `epochs`, with the rate falling at the same parts of the whole.

    >>> shortened(RECIPES["cifar10"], 30).decay_after
    (15, 22)
    """
    return replace(
        recipe,
        epochs=epochs,
        decay_after=tuple(after * epochs // recipe.epochs for after in recipe.decay_after),
        warmup_epochs=recipe.warmup_epochs * epochs // recipe.epochs,
    )
