"""Shift: the distance is the distance, and unusual images are called so."""

from __future__ import annotations

import torch

import trueup
from architectures import images, make
from trueup import functional as F


def test_the_distance_is_the_wasserstein_distance_of_each_image_at_each_site():
    model, x = make("vgg"), images(5, seed=9)
    targets = trueup.calibrate(model, [images(40)], resolution=None)
    shift = trueup.measure(model, targets, x)
    assert shift.sites == ("1", "4", "7", "11")
    a = model[:2](x).detach()
    torch.testing.assert_close(shift.distance[:, 0], F.wasserstein(a, targets["1"].target.float()))
    assert shift.distance.shape == shift.unusual.shape == (5, 4)


def test_shifted_images_are_unusual_and_clean_ones_are_not():
    model = make("resnet")
    everything = images(600)
    targets = trueup.calibrate(model, everything[:400].split(100))
    clean = trueup.measure(model, targets, everything[400:])
    assert (clean.unusual.mean(dim=0) - 0.5).abs().max() < 0.08
    assert ((clean.unusual > 0.9).float().mean(dim=0) < 0.2).all()
    noisy = everything[400:] + torch.randn_like(everything[400:])
    assert (trueup.measure(model, targets, noisy).unusual[:, 0] > 0.95).float().mean() > 0.9


def test_an_image_is_measured_alike_in_any_batch():
    model, x = make("resnet"), images(6, seed=4)
    targets = trueup.calibrate(model, [images(20)])
    together = trueup.measure(model, targets, x)
    for k in range(6):
        alone = trueup.measure(model, targets, x[k : k + 1])
        torch.testing.assert_close(alone.distance[0], together.distance[k], atol=1e-6, rtol=1e-4)


def test_it_prints_as_a_table():
    model = make("vgg")
    text = str(trueup.measure(model, trueup.calibrate(model, [images(8)]), images(3)))
    assert text.splitlines()[0].startswith("site  distance  unusual   (means over 3 images)")
    assert len(text.splitlines()) == 5
