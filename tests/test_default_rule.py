"""The rule that `correct` takes when it is given none. test_decision.py tests what calibration chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trueup
from architectures import images, make
from trueup.rules.evidence import CAREFUL
from trueup.targets import Decision, Trial
from trueup.targets.decision import LEFT_ALONE

STRONG = trueup.Evidence(budget=1.0, strength=0.1, base=0.0)


@pytest.fixture(scope="module")
def resnet():
    model = make("resnet")
    return model, trueup.calibrate(model, images(48).split(24), decide=False)


def decision(rule):
    trials = Trial(LEFT_ALONE, 100, 0.0, (1.0, 1.0), 0.0, 0.0), Trial(rule, 100, 1.0, (9.0, 9.0), 5.0, 0.3)
    return Decision(trials)


def test_it_is_the_one_that_calibration_chose(resnet):
    model, targets = resnet
    robust = trueup.correct(model, replace(targets, decision=decision(STRONG)))
    assert robust.rule == STRONG
    x = images(8, seed=3) * 0.3 - 1
    assert robust(x).equal(trueup.correct(model, targets, STRONG)(x))


def test_a_rule_that_is_given_wins(resnet):
    model, targets = resnet
    robust = trueup.correct(model, replace(targets, decision=decision(STRONG)), trueup.Correction())
    assert robust.rule == trueup.Correction()


def test_if_calibration_left_the_model_alone_so_does_correct(resnet):
    model, targets = resnet
    robust = trueup.correct(model, replace(targets, decision=Decision(note="of a test")))
    x = images(8, seed=3) * 0.3 - 1
    assert robust(x).equal(model(x))
    assert "does what the model does" in repr(robust)


def test_without_a_decision_it_is_careful_and_says_so(resnet):
    model, targets = resnet
    with pytest.warns(UserWarning, match="carry no decision, so Evidence.*pass rule="):
        assert trueup.correct(model, targets).rule == CAREFUL


def test_without_a_decision_and_without_norms_it_is_the_papers():
    model = make("vgg")
    targets = trueup.calibrate(model, [images(24)], decide=False)
    with pytest.warns(UserWarning, match="carry no decision, so Correction"):
        assert trueup.correct(model, targets).rule == trueup.Correction()


def test_a_model_without_norms_is_left_alone_and_calibration_says_so():
    model = make("vgg")
    with pytest.warns(UserWarning, match="no norm that could be corrected"):
        targets = trueup.calibrate(model, images(64).split(32))
    x = images(4, seed=3)
    assert trueup.correct(model, targets)(x).equal(model(x))
