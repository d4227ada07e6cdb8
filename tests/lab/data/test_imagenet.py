"""ImageNet's folder layout, on images made here."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trueup_lab.data.imagenet import Crop, ImageFolder, _random_box, read_image
from trueup_lab.data.images import IMAGENET, Images, Normalisation
from trueup_lab.data.root import MissingDataError


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for synset in ("n02", "n01", "n03"):
        (tmp_path / synset).mkdir()
        for k in range(3):
            pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / synset / f"{k}.JPEG")
        (tmp_path / synset / "notes.txt").write_text("no image")
    return tmp_path


def test_classes_are_the_synsets_in_alphabetical_order(folder, monkeypatch):
    listed = Path.iterdir  # whose order is the file system's
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), reverse=True)))
    images = ImageFolder(folder, Crop(size=8, resize=10))
    assert images.synsets == ("n01", "n02", "n03")
    assert [images[i][1] for i in range(len(images))] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert images[0][0].shape == (3, 8, 8)
    assert images[0][0].dtype == torch.uint8


def test_the_middle_of_an_image_of_the_right_size_is_taken_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 31, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    square = read_image(tmp_path / "a.png", Crop(size=10, resize=20))
    np.testing.assert_array_equal(square.permute(1, 2, 0).numpy(), pixels[5:15, 10:20])


def test_grey_images_come_in_three_equal_channels(tmp_path):
    Image.fromarray(np.arange(100, dtype=np.uint8).reshape(10, 10)).save(tmp_path / "grey.png")
    square = read_image(tmp_path / "grey.png", Crop(size=8, resize=10))
    assert torch.equal(square[0], square[1])
    assert torch.equal(square[0], square[2])


def test_random_crops_depend_on_seed_epoch_and_image_and_on_nothing_else(folder):
    def crops(seed, epoch):
        images = ImageFolder(folder, Crop(size=8, random=True), seed=seed)
        images.set_epoch(epoch)
        return torch.stack([images[i][0] for i in (3, 0)])

    assert torch.equal(crops(0, 0), crops(0, 0))
    assert not torch.equal(crops(0, 0), crops(0, 1))
    assert not torch.equal(crops(0, 0), crops(1, 0))


@given(st.integers(1, 500), st.integers(1, 500), st.integers())
def test_a_random_box_lies_inside_the_image(width, height, seed):
    left, top, w, h = _random_box(width, height, random.Random(seed))
    assert left >= 0
    assert top >= 0
    assert w >= 1
    assert h >= 1
    assert left + w <= width
    assert top + h <= height


def test_batches_hold_every_image_once_and_in_order(folder):
    batches = list(ImageFolder(folder, Crop(size=8, resize=10)).batches(4))
    assert [len(b) for b in batches] == [4, 4, 1]
    assert torch.cat([b.labels for b in batches]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_missing_or_empty_folder_says_what_was_wanted(tmp_path):
    with pytest.raises(MissingDataError, match=r"nowhere/<synset>/\*.JPEG; .*image-net.org"):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(MissingDataError, match=r"no images"):
        ImageFolder(tmp_path)


def test_normalisation_is_the_textbooks_to_float_precision():
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    want = (images.double() / 255 - torch.tensor(IMAGENET.mean).double().view(3, 1, 1)) / torch.tensor(
        IMAGENET.std
    ).double().view(3, 1, 1)
    torch.testing.assert_close(IMAGENET(images).double(), want, atol=1e-6, rtol=1e-6)


def test_normalisation_refuses_floats_and_other_channels():
    with pytest.raises(ValueError, match="uint8 images with 3 channels"):
        IMAGENET(torch.zeros(1, 3, 2, 2))
    with pytest.raises(ValueError, match="uint8 images with 1 channels"):
        Normalisation((0.0,), (1.0,))(torch.zeros(1, 3, 2, 2, dtype=torch.uint8))


def test_images_slice_and_move_together():
    data = Images(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), torch.arange(5))
    assert data.first(3).labels.tolist() == [0, 1, 2]
    assert data.to("cpu").labels.tolist() == [0, 1, 2, 3, 4]
