"""Which rule `correct` takes when it is given none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import trueup
from architectures import images, make

EVIDENCE, PAPER = trueup.Evidence(), trueup.Correction()
NAMES = {"relu", "layer1.0.relu"}


def answers(model, targets, rule=None, **options):
    return trueup.correct(model, targets, rule, **options)(images(8, seed=3) * 0.3 - 1)


@pytest.fixture(scope="module")
def resnet():
    model = make("resnet")
    return model, trueup.calibrate(model, images(48).split(24))


def test_with_norms_it_is_evidence(resnet):
    assert answers(*resnet).equal(answers(*resnet, EVIDENCE))
    assert not answers(*resnet).equal(answers(*resnet, PAPER))


def test_without_norms_it_is_the_papers():
    model = make("vgg")
    targets = trueup.calibrate(model, [images(24)])
    assert answers(model, targets).equal(answers(model, targets, PAPER))


@pytest.mark.parametrize("lacking", [{"gate": {}}, {"gate": {}, "channels": {}}], ids=["no gate", "no channels"])
def test_with_targets_of_an_earlier_version_it_is_the_papers(resnet, lacking):
    model, targets = resnet
    old = replace(targets, **lacking)
    assert answers(model, old).equal(answers(model, old, PAPER))


def test_where_calibration_left_norms_out_it_is_the_papers():
    model = make("resnet")
    targets = trueup.calibrate(model, [images(24)], select=lambda site: site.kind == "activation")
    assert answers(model, targets).equal(answers(model, targets, PAPER))


@pytest.mark.parametrize(
    "select", [lambda site: site.kind == "activation", lambda site: site.name in NAMES], ids=["by kind", "by name"]
)
def test_with_a_choice_of_activations_it_is_the_papers(resnet, select):
    assert answers(*resnet, select=select).equal(answers(*resnet, PAPER, select=select))
    assert not answers(*resnet, select=select).equal(resnet[0](images(8, seed=3) * 0.3 - 1))


@pytest.mark.parametrize(
    "select", [lambda site: site.kind == "norm", lambda site: "layer1" in site.name], ids=["by kind", "by name"]
)
def test_with_a_choice_that_has_norms_it_is_evidence_there(resnet, select):
    assert answers(*resnet, select=select).equal(answers(*resnet, EVIDENCE, select=select))


def test_with_the_last_norm_alone_it_is_evidence_which_says_that_it_leaves_that():
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())))
    targets = trueup.calibrate(model.eval(), [images(24)])
    with pytest.raises(ValueError, match=r"Evidence\(.* leaves what there is to correct as it is: the last fifteenth"):
        trueup.correct(model, targets, select=lambda site: site.name == "34")
