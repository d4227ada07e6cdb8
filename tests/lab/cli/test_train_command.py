"""`trueup train`, as a user calls it."""

from __future__ import annotations

import json

import pytest
import torch

from trueup_lab.data import digits
from trueup_lab.data.images import Images
from trueup_lab.data.sets import SETS, ImageSet


@pytest.fixture
def few_digits(monkeypatch):
    few = ImageSet("digits", lambda split, _: digits.load(split).first(16), image_channels=1)
    monkeypatch.setitem(SETS, "digits", few)


@pytest.fixture
def train(call):
    return lambda *arguments: call("train", "--device", "cpu", *arguments)


def test_it_trains_the_given_seeds_and_reports_progress(train, few_digits, tmp_path):
    result = train("--set", "digits", "--seeds", "0,2", "--epochs", 2, "--batch", 8, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "epoch 2/2  loss" in result.output
    assert "ms per model and step" in result.output
    assert "trained 2 models" in result.output
    assert (tmp_path / "digits-bn" / "record.json").exists()


def test_a_time_limit_ends_well_and_the_same_command_goes_on(train, few_digits, tmp_path, monkeypatch):
    arguments = ("--set", "digits", "--norm", "gn", "--epochs", 2, "--batch", 8, "--out", tmp_path)
    monkeypatch.setattr("trueup_lab.training.run.RESERVE", 9000)
    stopped = train(*arguments, "--time-limit", 900)
    assert stopped.exit_code == 0
    assert "run the same command again to continue" in stopped.output
    assert "epoch 2/2" in train(*arguments).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "svhn"), "unknown set 'svhn'; known: mnist, cifar10, imagenet, digits"),
        (("--set", "digits", "--norm", "ln"), "unknown norm 'ln'; known: bn"),
        (("--set", "cifar10", "--architecture", "vit", "--norm", "bn"), "unknown norm 'bn'; known: ln"),
        (("--set", "mnist", "--architecture", "vit"), "no recipe for 'vit' on 'mnist'"),
        (("--set", "mnist", "--architecture", "alexnet"), "unknown architecture 'alexnet'; known: resnet20, vgg"),
        (("--set", "digits", "--seeds", "a-b"), "expected seeds such as 0-9"),
        (("--set", "mnist", "--data", "nowhere"), "trueup data get mnist"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(train, arguments, message, tmp_path):
    result = train(*arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_another_architecture_has_its_own_norm_recipe_and_folder(train, monkeypatch, tmp_path):
    images = Images(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    monkeypatch.setitem(SETS, "cifar10", ImageSet("cifar10", lambda *_: images, image_channels=3))
    result = train("--set", "cifar10", "--architecture", "vit", "--epochs", 1, "--batch", 4, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "cifar10-vit-ln" / "record.json").read_text())
    assert record["choices"]["norm"] == "ln"
    assert record["choices"]["recipe"]["optimiser"] == "adamw"
