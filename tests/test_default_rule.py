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


def warned_answers(model, targets, why, **options):
    with pytest.warns(UserWarning, match=f"{why}, so the paper's rule is used; pass rule=trueup.Correction"):
        robust = trueup.correct(model, targets, **options)
    assert robust.rule == PAPER
    return robust(images(8, seed=3) * 0.3 - 1)


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
    assert warned_answers(model, targets, "there is no norm to correct").equal(answers(model, targets, PAPER))


@pytest.mark.parametrize(
    ("lacking", "why"),
    [({"gate": {}}, "these targets hold no gate .*earlier version"), ({"gate": {}, "norms": {}}, "there is no norm")],
    ids=["no gate", "no norms"],
)
def test_with_targets_of_an_earlier_version_it_is_the_papers(resnet, lacking, why):
    model, targets = resnet
    old = replace(targets, **lacking)
    assert warned_answers(model, old, f"{why}.*").equal(answers(model, old, PAPER))


def test_where_calibration_left_norms_out_it_is_the_papers():
    model = make("resnet")
    targets = trueup.calibrate(model, [images(24)], select=lambda site: site.kind == "activation")
    assert warned_answers(model, targets, "there is no norm to correct").equal(answers(model, targets, PAPER))


@pytest.mark.parametrize(
    "select", [lambda site: site.kind == "activation", lambda site: site.name in NAMES], ids=["by kind", "by name"]
)
def test_with_a_choice_of_activations_it_is_the_papers(resnet, select):
    found = warned_answers(*resnet, "there is no norm to correct", select=select)
    assert found.equal(answers(*resnet, PAPER, select=select))
    assert not found.equal(resnet[0](images(8, seed=3) * 0.3 - 1))


@pytest.mark.parametrize(
    "select", [lambda site: site.kind == "norm", lambda site: "layer1" in site.name], ids=["by kind", "by name"]
)
def test_with_a_choice_that_has_norms_it_is_evidence_there(resnet, select):
    assert answers(*resnet, select=select).equal(answers(*resnet, EVIDENCE, select=select))


def test_with_the_last_norm_alone_it_is_evidence_which_says_that_it_leaves_that():
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())))
    targets = trueup.calibrate(model.eval(), [images(24)])
    with pytest.raises(ValueError, match=r"nothing to correct: Evidence\(.* skips the last 7% of the norms"):
        trueup.correct(model, targets, select=lambda site: site.name == "34")


@pytest.mark.parametrize("rule", [EVIDENCE, trueup.Evidence(budget=1), trueup.Evidence(least=0)], ids=str)
def test_no_site_is_corrected_that_was_not_selected(resnet, rule):
    for last in ("layer1.0.bn3", "layer1.1.bn2"):  # the gate has read all before them
        robust = trueup.correct(*resnet, rule, select=lambda site, last=last: site.name == last)
        assert [site.name for site in robust.sites] == [last]


def test_no_site_is_corrected_beyond_the_depth_of_the_rule():
    """Not even before the gate has read, which it does at the third and fourth of these norms."""
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))))
    targets = trueup.calibrate(model.eval(), [images(24)])
    for depth, count in ((1 / 12, 1), (1 / 2, 6), (1.0, 12)):
        assert len(trueup.correct(model, targets, trueup.Evidence(depth=depth)).sites) == count
