"""Test sets: the right images under the right numbers, read where they are there, made where not."""

from __future__ import annotations

import pytest
import torch

from trueup_lab.data import cifar10
from trueup_lab.data.corrupted_sets.manifest import Manifest
from trueup_lab.data.corrupted_sets.writer import make
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.imagenet import Crop, ImageFolder
from trueup_lab.data.root import MissingDataError
from trueup_lab.evaluation import Benchmark, Case

ALL = torch.arange


def test_some_images_are_spread_over_the_set_and_keep_their_numbers(small_root):
    benchmark = Benchmark("cifar10", root=small_root, images=4, seed=5)
    assert benchmark.numbers.tolist() == [0, 3, 6, 9]
    test = benchmark.open(Case("gaussian_noise", 2))
    whole = cifar10.load("test", small_root)
    noisy = corrupt(whole.images, "gaussian_noise", 2, family="cifar10-c", seed=5)
    assert test.take(torch.tensor([2, 1])).equal(noisy[[6, 3]])
    assert test.labels.equal(whole.labels[benchmark.numbers])
    assert test.origin == "generated"
    assert benchmark.open(Case("identity", 0)).take(ALL(4)).equal(whole.images[benchmark.numbers])


def test_published_arrays_are_read_and_named_so(small_root):
    make("cifar10-c", root=small_root, only=["contrast"], seed=9)
    benchmark = Benchmark("cifar10", root=small_root, images=6)
    made = benchmark.open(Case("contrast", 4))
    assert made.origin == "generated"
    manifest = next(p for p in (small_root / "CIFAR-10-C").iterdir() if p.suffix not in (".npy",))
    assert Manifest.read(manifest.parent).files
    manifest.unlink()  # without it, they are taken for the published ones
    found = Benchmark("cifar10", root=small_root, images=6).open(Case("contrast", 4))
    assert found.origin == "published"
    assert found.take(ALL(6)).equal(made.take(ALL(6)))
    asked = Benchmark("cifar10", root=small_root, origin="generated").open(Case("contrast", 4))
    assert asked.origin == "generated"


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
    assert test.origin == "generated"  # its manifest says so
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
