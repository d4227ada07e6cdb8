"""Errors name the value, the expectation, and the way out."""

from __future__ import annotations

import pytest
import torch

from trueup_lab.data.corruptions import corrupt, corruption_names
from trueup_lab.data.root import MissingDataError

GOOD = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("images", "arguments", "error", "message"),
    [
        (GOOD, ("fogg", 1), ValueError, "did you mean 'fog'"),
        (GOOD, ("shear", 1), ValueError, "unknown corruption of cifar10-c 'shear'.*known: brightness"),
        (GOOD, ("fog", 0), ValueError, "severity=0.*1 to 5"),
        (GOOD, ("fog", 6), ValueError, "severity=6.*1 to 5"),
        (GOOD, ("fog", None), ValueError, "severity=None.*1 to 5"),
        (GOOD, ("fog", 2.0), ValueError, "severity=2.0.*an integer"),
        (GOOD.float(), ("fog", 1), TypeError, "float32.*uint8.*convert floats"),
        (
            GOOD[0],
            ("fog", 1),
            ValueError,
            r"\(3, 32, 32\); cifar10-c takes uint8 images \(N, 3, 32, 32\)",
        ),
        (GOOD[:, :1], ("fog", 1), ValueError, r"\(2, 1, 32, 32\)"),
        (GOOD[..., :31], ("fog", 1), ValueError, r"\(2, 3, 32, 31\)"),
        (GOOD.numpy(), ("fog", 1), TypeError, "ndarray.*torch tensor"),
    ],
)
def test_bad_input_is_refused(images, arguments, error, message):
    with pytest.raises(error, match=message):
        corrupt(images, *arguments, family="cifar10-c")


def test_an_unknown_family_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"did you mean 'cifar10-c'.*mnist-c, cifar10-c, imagenet-c"):
        corrupt(GOOD, "fog", 1, family="cifar-10-c")
    with pytest.raises(ValueError, match="did you mean 'mnist-c'"):
        corruption_names("mnist_c")


@pytest.mark.parametrize("indices", [[1], [1, 2, 3], [0.5, 1.5], [True, False], [[0, 1]]])
def test_indices_are_one_integer_per_image(indices):
    with pytest.raises(ValueError, match="one integer per image"):
        corrupt(GOOD, "fog", 1, family="cifar10-c", indices=indices)


def test_a_corruption_without_severities_takes_none():
    x = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    assert corrupt(x, "stripe", family="mnist-c").shape == x.shape
    with pytest.raises(ValueError, match="stripe of mnist-c has no severities"):
        corrupt(x, "stripe", 3, family="mnist-c")


def test_missing_textures_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TRUEUP_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"frost1\.png.*hendrycks/robustness"):
        corrupt(GOOD, "frost", 1, family="cifar10-c")


def test_no_images_are_no_images():
    assert corrupt(GOOD[:0], "fog", 1, family="cifar10-c").shape == (0, 3, 32, 32)


def test_the_lists_are_the_published_ones():
    assert [len(corruption_names(family)) for family in ("mnist-c", "cifar10-c", "imagenet-c")] == [16, 19, 19]
    assert corruption_names("cifar10-c") == corruption_names("imagenet-c")
