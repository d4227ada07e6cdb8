"""Scikit-learn's digits as a set."""

from __future__ import annotations

import pytest
import torch

from trueup_lab.data import digits
from trueup_lab.data.sets import SETS


def test_training_and_test_images_are_disjoint_and_all():
    train, test = digits.load("train"), digits.load("test")
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape[1:] == (1, 28, 28)
    assert train.images.dtype == torch.uint8
    assert int(train.images.max()) == 255
    ours = {bytes(image.numpy()) for image in train.images}
    assert not any(bytes(image.numpy()) in ours for image in test.images)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'val' of digits"):
        digits.load("val")


@pytest.mark.parametrize("name", ["mnist", "cifar10", "digits"])
def test_a_set_knows_its_channels(name):
    assert len(SETS[name].normalisation.mean) == SETS[name].image_channels
