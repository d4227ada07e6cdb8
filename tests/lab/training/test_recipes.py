"""The recipes say what the paper says."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup_lab.training.recipes import ARCHITECTURE_RECIPES, RECIPES, Recipe, learning_rate, recipe_for, shortened


@pytest.mark.parametrize(
    ("name", "epochs", "rates"),
    [
        ("mnist", 50, {0: 0.1, 24: 0.1, 25: 0.01, 39: 0.01, 40: 0.001, 49: 0.001}),
        ("cifar10", 300, {0: 0.1, 149: 0.1, 150: 0.01, 224: 0.01, 225: 0.001, 299: 0.001}),
        ("imagenet", 90, {0: 0.02, 5: 0.1, 29: 0.1, 30: 0.01, 60: 1e-3, 79: 1e-3, 80: 1e-4, 89: 1e-4}),
    ],
)
def test_the_papers_epochs_and_rates(name, epochs, rates):
    recipe = RECIPES[name]
    assert recipe.epochs == epochs
    for epoch, rate in rates.items():
        assert learning_rate(recipe, epoch, 0, 100) == pytest.approx(rate)


def test_only_cifar10_is_mirrored_and_cropped_by_four():
    assert {name for name, recipe in RECIPES.items() if recipe.mirror} == {"cifar10"}
    assert RECIPES["cifar10"].crop_padding == 4
    assert RECIPES["mnist"].crop_padding == 0


@given(st.integers(1, 50), st.data())
def test_the_warm_up_rises_by_the_same_amount_every_step(steps, data):
    k = data.draw(st.integers(0, 5 * steps - 1))
    rates = [learning_rate(RECIPES["imagenet"], n // steps, n % steps, steps) for n in (k, k + 1)]
    assert rates[1] - rates[0] == pytest.approx(0.08 / (5 * steps))


@given(st.integers(1, 1000))
def test_a_shortened_recipe_decays_at_the_same_parts_of_the_whole(epochs):
    recipe = shortened(RECIPES["cifar10"], epochs)
    assert recipe.epochs == epochs
    for after, original in zip(recipe.decay_after, (150, 225), strict=True):
        assert after == math.floor(Fraction(original, 300) * epochs)


@given(st.integers(1, 30), st.integers(1, 7))
def test_a_cosine_falls_from_the_rate_to_nearly_nothing(epochs, steps):
    recipe = Recipe(epochs=epochs, schedule="cosine", rate=0.3)
    rates = [learning_rate(recipe, n // steps, n % steps, steps) for n in range(epochs * steps)]
    assert rates[0] == pytest.approx(0.3)
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] <= 0.3 * (math.pi / (2 * epochs * steps)) ** 2 * 1.01  # cosine's last step, to second order


@pytest.mark.parametrize("name", ARCHITECTURE_RECIPES)
def test_a_recipe_of_another_architecture_can_be_shortened_to_an_epoch(name):
    recipe = shortened(recipe_for(*name), 1)
    assert (recipe.epochs, recipe.warmup_epochs) == (1, 0)
    assert learning_rate(recipe, 0, 0, 10) == recipe.rate


def test_unknown_words_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="no recipe for 'vit' on 'mnist'; known besides resnet20's: vgg on cifar10"):
        recipe_for("mnist", "vit")
    with pytest.raises(ValueError, match="unknown optimiser 'lion'; known: sgd, adamw"):
        Recipe(epochs=1, optimiser="lion")
    with pytest.raises(ValueError, match="unknown schedule 'linear'; known: steps, cosine"):
        Recipe(epochs=1, schedule="linear")
