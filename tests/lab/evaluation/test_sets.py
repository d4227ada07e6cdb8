"""Test sets: the right images under the right numbers, read where they are there, made where not."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from trueup_lab.data import cifar10
from trueup_lab.data.corrupted_sets.writer import make
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.imagenet import Crop, ImageFolder
from trueup_lab.data.root import MissingDataError
from trueup_lab.evaluation import Benchmark, Case

ALL = torch.arange


def test_some_images_are_spread_over_the_set_and_keep_their_numbers(small_root):
    benchmark = Benchmark("cifar10", root=small_root, images=4, seed=5)
    assert benchmark.image_numbers.tolist() == [0, 3, 6, 9]
    test = benchmark.open(Case("gaussian_noise", 2))
    whole = cifar10.load("test", small_root)
    noisy = corrupt(whole.images, "gaussian_noise", 2, family="cifar10-c", seed=5)
    assert test.take(torch.tensor([2, 1])).equal(noisy[[6, 3]])
    assert test.labels.equal(whole.labels[benchmark.image_numbers])
    assert test.origin == "generated"
    assert benchmark.open(Case("identity", 0)).take(ALL(4)).equal(whole.images[benchmark.image_numbers])


def test_published_arrays_are_read_and_named_so(small_root):
    rng = np.random.default_rng(0)
    (small_root / "CIFAR-10-C").mkdir()
    pixels = rng.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    np.save(small_root / "CIFAR-10-C" / "contrast.npy", pixels)
    np.save(small_root / "CIFAR-10-C" / "labels.npy", np.tile(np.arange(12) % 10, 5))
    found = Benchmark("cifar10", root=small_root, images=6).open(Case("contrast", 4))
    assert found.origin == "published"
    assert found.take(ALL(6)).equal(torch.from_numpy(pixels[36:48:2]).permute(0, 3, 1, 2))
    asked = Benchmark("cifar10", root=small_root, origin="generated").open(Case("contrast", 4))
    assert asked.origin == "generated"


@pytest.mark.parametrize(("name", "family"), [("cifar10", "cifar10-c"), ("imagenet", "imagenet-c")])
def test_a_set_that_was_made_with_another_seed_is_not_read(small_root, name, family):
    make(family, root=small_root, only=["shot_noise"], severities=(3,), seed=0)
    case = Case("shot_noise", 3)
    made = Benchmark(name, root=small_root, images=2, seed=0).open(case)
    asked = Benchmark(name, root=small_root, images=2, seed=7).open(case)
    shutil.rmtree(small_root / {"cifar10": "CIFAR-10-C", "imagenet": "ImageNet-C"}[name])
    wanted = Benchmark(name, root=small_root, images=2, seed=7).open(case).take(ALL(2))
    assert asked.origin == "generated"
    assert asked.take(ALL(2)).equal(wanted)
    if name == "cifar10":  # which is stored without loss
        assert not made.take(ALL(2)).equal(wanted)


def test_a_damaged_array_is_refused_by_name(small_root):
    make("cifar10-c", root=small_root, only=["contrast"])
    path = small_root / "CIFAR-10-C" / "contrast.npy"
    content = bytearray(path.read_bytes())
    content[-5000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"contrast\.npy is damaged.*trueup data make"):
        Benchmark("cifar10", root=small_root).open(Case("contrast", 4))


def test_published_sets_that_are_not_there_are_asked_for_by_name(small_root):
    with pytest.raises(MissingDataError, match="trueup data get cifar10-c"):
        Benchmark("cifar10", root=small_root, origin="published").open(Case("fog", 1))


def test_imagenet_without_training_images_tests_one_half_and_calibrates_on_the_other(small_root):
    benchmark = Benchmark("imagenet", root=small_root)
    folder = ImageFolder(small_root / "imagenet" / "val", Crop(224, 256))
    pixels = torch.stack([folder[k][0] for k in range(4)])
    assert benchmark.open(Case("identity", 0)).take(ALL(2)).equal(pixels[[0, 2]])
    assert benchmark.open(Case("identity", 0)).labels.tolist() == [0, 1]
    assert torch.cat(list(benchmark.calibration(batch=1))).equal(pixels[[1, 3]])
    assert torch.cat(list(benchmark.calibration(batch=1, part=(1, 2)))).equal(pixels[[3]])
    wanted = corrupt(pixels[[0, 2]], "contrast", 3, family="imagenet-c", indices=[0, 2])
    assert benchmark.open(Case("contrast", 3)).take(torch.tensor([1, 0])).equal(wanted[[1, 0]])


def test_imagenet_c_is_read_from_its_folders(small_root):
    make("imagenet-c", root=small_root, only=["contrast"], severities=(3,))
    test = Benchmark("imagenet", root=small_root).open(Case("contrast", 3))
    assert test.origin == "generated, jpeg"  # its manifest says so
    assert test.take(ALL(2)).shape == (2, 3, 224, 224)
    assert test.labels.tolist() == [0, 1]


def test_cases_are_every_corruption_and_severity_and_the_clean_set():
    benchmark = Benchmark("digits")
    benchmark.family = "cifar10-c"
    cases = benchmark.cases((1, 5))
    assert len(cases) == 1 + 19 * 2
    assert cases[0] == Case("identity", 0)
    assert benchmark.cases((5,), ("fog",)) == [Case("fog", 5)]


def test_an_unknown_set_is_refused():
    with pytest.raises(ValueError, match="no benchmark for set 'svhn'; known: mnist, digits, cifar10, imagenet"):
        Benchmark("svhn")
