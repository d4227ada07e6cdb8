"""ImageNet training on one process and on two, on made-up JPEGs in its folder layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from trueup_lab.data.imagenet import ImageFolder
from trueup_lab.data.root import MissingDataError
from trueup_lab.training.checkpoint import load_checkpoint
from trueup_lab.training.imagenet import Choices, train_imagenet
from trueup_lab.training.recipes import Recipe

# As `command` asks for.
RECIPE = Recipe(epochs=2, decay_after=(0, 1, 1), batch=4, rate=0.0001)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("root")
    rng = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 3)):
        for synset in ("n01", "n02"):
            folder = tmp_path / "imagenet" / split / synset
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{k}.JPEG")
    return tmp_path


@pytest.fixture(scope="module")
def trained(root, tmp_path_factory):
    """Folder of a run of one process, and the training images in the order in which it read them."""
    out, seen, read = tmp_path_factory.mktemp("one"), [], ImageFolder.__getitem__

    def note(folder, index):
        if folder.crop.random:
            seen.append(index)
        return read(folder, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFolder, "__getitem__", note)
        assert train_imagenet(Choices("gn", 0, RECIPE, size=32), out, data=root, device="cpu", workers=0)
    return out, seen


def command(root, out, *extra):
    return [
        *("-m", "trueup_lab", "train", "--set", "imagenet", "--norm", "gn", "--data", str(root), "--out", str(out)),
        *("--epochs", "2", "--batch", "4", "--rate", "0.0001", "--warmup-epochs", "0", "--image-size", "32"),
        *("--workers", "0", "--device", "cpu", *extra),
    ]


def test_two_processes_train_what_one_trains(root, trained, tmp_path):
    # Group norm, so that nothing but the order of sums depends on how a batch is shared out.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, *command(root, tmp_path / "two")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch ") == 2  # one process speaks
    one, facts = load_checkpoint(trained[0] / "checkpoint.safetensors")
    two, facts_of_two = load_checkpoint(tmp_path / "two" / "imagenet-gn" / "checkpoint.safetensors")
    assert facts["choices"] == facts_of_two["choices"]
    assert facts["history"][-1] == pytest.approx(facts_of_two["history"][-1], rel=1e-3)
    assert one.keys() == two.keys()
    # Rounding switches a few ReLUs on some processors, and so changes single gradients. Gradients that were not shared
    # would lie more than half their size apart.
    for key, value in one.items():
        assert (two[key] - value).norm() <= 0.1 * value.norm(), key
    record = json.loads((tmp_path / "two" / "imagenet-gn" / "record.json").read_text())
    assert record["processes"] == 2


def test_a_run_stopped_by_its_time_limit_goes_on_bit_for_bit(root, tmp_path):
    choices = Choices("bn", 1, RECIPE, size=32)
    options = {"data": root, "device": "cpu", "workers": 0}
    assert train_imagenet(choices, tmp_path / "whole", **options)
    assert not train_imagenet(choices, tmp_path / "parts", time_limit=0, **options)
    assert train_imagenet(choices, tmp_path / "parts", **options)
    whole, parts = (load_checkpoint(tmp_path / n / "checkpoint.safetensors") for n in ("whole", "parts"))
    assert whole[1] == parts[1]
    for key, value in whole[0].items():
        assert torch.equal(value, parts[0][key]), key


def test_every_epoch_sees_the_images_in_another_order_and_each_at_most_once(trained):
    first, second = trained[1][:8], trained[1][8:]  # two batches of four per epoch
    assert len(set(first)) == len(set(second)) == 8
    assert first != second


def test_the_checkpoint_of_another_run_is_refused(root, trained):
    with pytest.raises(ValueError, match="another run"):
        train_imagenet(Choices("gn", 1, RECIPE, size=32), trained[0], data=root, device="cpu", workers=0)


def test_missing_images_name_the_folder(tmp_path):
    with pytest.raises(MissingDataError, match=r"imagenet/train/<synset>"):
        train_imagenet(Choices("gn", 0, RECIPE), tmp_path, data=tmp_path, device="cpu")
