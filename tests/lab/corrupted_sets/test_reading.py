"""Corrupted sets on the disk, as published and as made here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from trueup_lab.data.corrupted_sets import imagenet_c, load
from trueup_lab.data.corrupted_sets.manifest import Manifest
from trueup_lab.data.corrupted_sets.writer import make
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.root import MissingDataError


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def write_cifar_c(root, rng, name="fog", count=20, labels=None):
    top = root / "CIFAR-10-C"
    top.mkdir(parents=True, exist_ok=True)
    images = rng.integers(0, 256, (5 * count, 32, 32, 3), dtype=np.uint8)
    each = rng.integers(0, 10, count).astype(np.uint8)
    np.save(top / f"{name}.npy", images)
    np.save(top / "labels.npy", np.tile(each, 5) if labels is None else labels)
    return images, each


def test_cifar_10_c_has_its_severities_one_after_another(tmp_path, rng):
    images, labels = write_cifar_c(tmp_path, rng)
    found = load("cifar10-c", "fog", 3, root=tmp_path)
    assert found.origin == "published"
    assert torch.equal(found.images, torch.from_numpy(images[40:60]).permute(0, 3, 1, 2))
    assert found.labels.dtype == torch.int64
    assert found.labels.tolist() == labels.tolist()
    assert len(found) == 20


def test_reading_maps_the_file_and_leaves_it_alone(tmp_path, rng):
    write_cifar_c(tmp_path, rng)
    path = tmp_path / "CIFAR-10-C" / "fog.npy"
    before = path.read_bytes()
    found = load("cifar10-c", "fog", 1, root=tmp_path)
    found.images.zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("folder", ["MNIST-C", "mnist_c"])
@pytest.mark.parametrize(("images", "labels"), [("test_images", "test_labels"), ("images", "labels")])
@pytest.mark.parametrize("channel", [(), (1,)])
def test_mnist_c_is_read_however_its_files_are_called(tmp_path, rng, folder, images, labels, channel):
    top = tmp_path / folder / "zigzag"
    top.mkdir(parents=True)
    pixels = rng.integers(0, 256, (6, 28, 28, *channel), dtype=np.uint8)
    np.save(top / f"{images}.npy", pixels)
    np.save(top / f"{labels}.npy", np.arange(6))
    found = load("mnist-c", "zigzag", root=tmp_path)
    assert found.origin == "published"
    assert found.images.shape == (6, 1, 28, 28)
    assert np.array_equal(found.images[:, 0].numpy(), pixels.reshape(6, 28, 28))


def test_another_severity_than_the_published_is_made(small_root, rng):
    top = small_root / "MNIST-C" / "fog"
    top.mkdir(parents=True)
    np.save(top / "test_images.npy", rng.integers(0, 256, (12, 28, 28, 1), dtype=np.uint8))
    np.save(top / "test_labels.npy", np.zeros(12))
    assert load("mnist-c", "fog", root=small_root).origin == "published"
    assert load("mnist-c", "fog", 5, root=small_root).origin == "published"
    assert load("mnist-c", "fog", 2, root=small_root).origin == "generated"
    assert load("mnist-c", "fog", root=small_root, origin="generated").origin == "generated"
    with pytest.raises(MissingDataError, match="published at severity 5 only"):
        load("mnist-c", "fog", 2, root=small_root, origin="published")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(99), "99.*labels for the 100 images"),
        (np.arange(100) % 10 + np.arange(100) // 50, "does not repeat the same labels"),
    ],
)
def test_labels_that_do_not_match_are_refused(tmp_path, rng, labels, message):
    write_cifar_c(tmp_path, rng, labels=labels)
    with pytest.raises(ValueError, match=message):
        load("cifar10-c", "fog", 1, root=tmp_path)


def test_a_broken_array_is_named(tmp_path, rng):
    write_cifar_c(tmp_path, rng)
    path = tmp_path / "CIFAR-10-C" / "fog.npy"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"fog\.npy is broken.*again"):
        load("cifar10-c", "fog", 1, root=tmp_path)
    np.save(path, np.zeros((100, 32, 32, 3), dtype=np.float32))
    with pytest.raises(ValueError, match=r"float32.*expected uint8 \(N, 32, 32, 3\)"):
        load("cifar10-c", "fog", 1, root=tmp_path)


def test_a_missing_set_is_made_or_named(small_root):
    found = load("cifar10-c", "contrast", 2, root=small_root)
    assert found.origin == "generated"
    assert len(found) == 12
    with pytest.raises(MissingDataError, match=r"CIFAR-10-C; get it with `trueup data get cifar10-c`"):
        load("cifar10-c", "contrast", 2, root=small_root, origin="published")


def test_imagenet_c_from_a_clean_folder_and_from_its_own(small_root):
    made = imagenet_c("fog", 2, root=small_root)
    assert made.origin == "generated"
    clean = torch.stack([made.source[k][0] for k in range(len(made))])
    wanted = corrupt(clean, "fog", 2, family="imagenet-c")
    assert torch.equal(made[3][0], wanted[3])
    batches = list(made.batches(2))
    assert torch.equal(torch.cat([batch.images for batch in batches]), wanted)
    assert [label for batch in batches for label in batch.labels.tolist()] == [0, 0, 1, 1]
    with pytest.raises(MissingDataError, match=r"weather/fog/2.*trueup data get imagenet-c"):
        imagenet_c("fog", 2, root=small_root, origin="published")

    make("imagenet-c", root=small_root, only=["fog"], severities=[2])
    stored = imagenet_c("fog", 2, root=small_root)
    assert stored.seed is None
    assert stored.origin == "generated"
    assert (stored[3][0].int() - wanted[3].int()).abs().float().mean() < 3  # JPEG


def write_imagenet_c(root, unit="weather/fog/2"):
    (root / "ImageNet-C" / unit / "n01440764").mkdir(parents=True)
    for k in range(2):
        pixels = np.full((224, 224, 3), 100 * k, dtype=np.uint8)
        Image.fromarray(pixels).save(root / "ImageNet-C" / unit / "n01440764" / f"{k}.JPEG")


@pytest.mark.parametrize("unit", ["weather/fog/2", "fog/2"])
def test_published_folders_are_read_also_beside_generated_ones(small_root, unit):
    write_imagenet_c(small_root, unit)
    assert imagenet_c("fog", 2, root=small_root).origin == "published"
    make("imagenet-c", root=small_root, only=["contrast"], severities=[2])
    found = imagenet_c("fog", 2, root=small_root)
    assert found.origin == "published"
    assert len(found) == 2


@pytest.mark.parametrize(
    "read",
    [lambda root: load("cifar10-c", "contrast", 2, root=root), lambda root: imagenet_c("contrast", 2, root=root)],
)
def test_a_generated_file_never_passes_for_a_published_one(small_root, read):
    """Neither when its manifest is deleted, nor when another process wrote one without it."""
    for family in ("cifar10-c", "imagenet-c"):
        make(family, root=small_root, only=["contrast"], severities=[2])
    manifests = [small_root / top / "trueup-manifest.json" for top in ("CIFAR-10-C", "ImageNet-C")]
    for path in manifests:
        path.unlink()
    assert read(small_root).origin == "generated"
    for path in manifests:
        Manifest(path.parent).write()
    assert read(small_root).origin == "generated"


def test_a_file_that_a_manifest_does_not_list_is_not_taken_for_published(small_root, rng):
    make("cifar10-c", root=small_root, only=["contrast"])
    make("imagenet-c", root=small_root, only=["contrast"], severities=[2])
    write_cifar_c(small_root, rng)
    write_imagenet_c(small_root)
    for read in (lambda: load("cifar10-c", "fog", 2, root=small_root), lambda: imagenet_c("fog", 2, root=small_root)):
        with pytest.raises(ValueError, match=r"is not listed in .*trueup-manifest\.json.*delete it and run"):
            read()


def test_images_that_are_missing_or_damaged_are_noticed(small_root):
    make("imagenet-c", root=small_root, only=["fog"], severities=[2])
    files = sorted((small_root / "ImageNet-C" / "weather" / "fog" / "2").glob("*/*.JPEG"))
    content = bytearray(files[1].read_bytes())
    content[-200] ^= 4
    files[1].write_bytes(content)
    with pytest.raises(ValueError, match=r"n01440764_1\.JPEG is damaged: it does not match its own checksum"):
        imagenet_c("fog", 2, root=small_root)[1]
    assert make("imagenet-c", root=small_root, only=["fog"], severities=[2]) == ["weather/fog/2"]
    assert imagenet_c("fog", 2, root=small_root)[1][0].shape == (3, 224, 224)
    files[0].unlink()
    with pytest.raises(ValueError, match=r"fog/2 is damaged: images are missing"):
        imagenet_c("fog", 2, root=small_root)
    assert make("imagenet-c", root=small_root, only=["fog"], severities=[2]) == ["weather/fog/2"]
    assert len([imagenet_c("fog", 2, root=small_root)[k] for k in range(4)]) == 4


def test_a_mark_that_contradicts_the_manifest_is_damage(small_root):
    make("imagenet-c", root=small_root, only=["fog"], severities=[2])
    first = min((small_root / "ImageNet-C" / "weather" / "fog" / "2").glob("*/*.JPEG"))
    content = first.read_bytes()
    at = content.index(b"recipe ") + 7
    first.write_bytes(content[:at] + b"0123456789ab" + content[at + 12 :])
    with pytest.raises(ValueError, match="fog/2 is damaged: its mark names another recipe"):
        imagenet_c("fog", 2, root=small_root)
    assert make("imagenet-c", root=small_root, only=["fog"], severities=[2]) == ["weather/fog/2"]
    assert first.read_bytes() == content


def test_a_truncated_photograph_is_named(small_root):
    path = small_root / "imagenet" / "val" / "n01443537" / "n01443537_0.JPEG"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"{path.name} is not an image, or is damaged"):
        imagenet_c("fog", 2, root=small_root)[2]
