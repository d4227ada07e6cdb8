"""Numbers behind the pictures of activations, against direct computation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trueup
from trueup_lab.experiments.activations import activation_maps, before_and_after, most_dissimilar, stationarity


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU()).eval()


@pytest.fixture
def images():
    return torch.rand(20, 1, 12, 12, generator=torch.Generator().manual_seed(1))


FULL = trueup.Correction(lambda1=1.0, lambda2=0.0, location="match", sparse=False, method="sort")


def test_maps_are_means_over_channels_without_and_with_correction(model, images):
    targets = trueup.calibrate(model, [images], decide=False)
    maps = activation_maps(model, targets, FULL, images[0], layers=2)
    with torch.inference_mode():
        first = torch.relu(model[0](images[:1]))
        torch.testing.assert_close(maps.plain[0], first[0].mean(0))
        corrected = trueup.functional.correct(
            first,
            targets.activations["1"].order_statistics(first[0].numel()),
            FULL.step,
            location="match",
            sparse=False,
        )
        torch.testing.assert_close(maps.corrected[0], corrected[0].mean(0))
        torch.testing.assert_close(maps.plain[1], model(images[:1])[0].mean(0))
        torch.testing.assert_close(maps.corrected[1], trueup.correct(model, targets, FULL)(images[:1])[0].mean(0))


def test_a_full_step_lands_on_the_target(model, images):
    targets = trueup.calibrate(model, [images], resolution=None, decide=False)
    data = before_and_after(model, targets, FULL, images[3] * 0.5 + 0.4)
    distance = (data.after.flatten().sort().values - data.target).abs().mean()
    before = (data.before.flatten().sort().values - data.target).abs().mean()
    assert distance < 0.2 * before  # equal values (zeros) share their targets' mean
    assert data.before.shape == (4, 100)


def test_order_statistics_have_the_mean_and_spread_of_sorted_rows(model, images):
    found = stationarity(model, "0", images.split(6))
    ordered = model[0](images).flatten(1).sort(dim=1).values.double().detach()
    torch.testing.assert_close(found.mean, ordered.mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.spread, ordered.std(0, correction=0), atol=1e-6, rtol=1e-4)
    direct = torch.distributions.Normal(0.0, found.spread).log_prob(torch.tensor([[0.1]], dtype=torch.float64))
    torch.testing.assert_close(found.log_density(torch.tensor([0.1], dtype=torch.float64)), direct)


def test_the_most_dissimilar_image_has_the_largest_sum_of_differences(model, images):
    images[13] = images[13] * 3
    found = most_dissimilar(model, "0", images.split(7), first=4)
    per_channel = model[0](images).flatten(2).sort(dim=2).values
    wanted = (per_channel - per_channel[4]).abs().sum((1, 2))
    torch.testing.assert_close(found.distance, wanted.detach())
    assert found.farthest == int(wanted.argmax()) == 13
