"""Crops and mirrorings, against NumPy's pad, slice and flip."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup_lab.training.augment import crop_and_mirror, draw_epoch


@given(st.integers(0, 4), st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_crop_and_mirror_is_pad_slice_and_flip(padding, height, width, seed):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (5, 3, height, width), dtype=np.uint8)
    shift = rng.integers(0, 2 * padding + 1, (5, 2))
    mirror = rng.random(5) < 0.5
    got = crop_and_mirror(*map(torch.from_numpy, (images, shift, mirror)), padding)
    assert got.dtype == torch.uint8
    for image, (top, left), mirrored, result in zip(images, shift, mirror, got.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        want = padded[:, top : top + height, left : left + width]
        np.testing.assert_array_equal(result, want[:, :, ::-1] if mirrored else want)


def draw(seed=0, epoch=0, **options):
    return draw_epoch(seed, epoch, 1000, **{"used": 960, "padding": 4, "mirror": True} | options)


def test_an_epoch_uses_no_image_twice():
    order = draw().order.tolist()
    assert len(order) == len(set(order)) == 960
    assert set(order) <= set(range(1000))


def test_every_shift_is_drawn_and_half_of_the_images_are_mirrored():
    draws = draw()
    assert torch.bincount(draws.shift.flatten(), minlength=9).min() > 150  # 213 expected
    assert 400 < int(draws.mirror.sum()) < 560
    assert not draw(mirror=False).mirror.any()
    assert not draw(padding=0).shift.any()


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}])
def test_other_seeds_and_epochs_draw_otherwise_and_the_same_ones_the_same(other):
    assert all(torch.equal(a, b) for a, b in zip(draw(), draw(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(draw(), draw(**other), strict=True))


def test_seed_and_epoch_do_not_blend():
    assert not torch.equal(draw(seed=1, epoch=11).order, draw(seed=11, epoch=1).order)
