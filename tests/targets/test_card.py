"""The section for a model card says what calibration chose, and says so when it chose nothing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import trueup
from trueup.rules import Evidence
from trueup.targets.decision import LEFT_ALONE, Decision, Trial


def small_targets() -> trueup.Targets:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    return trueup.calibrate(model, [torch.randn(12, 3, 8, 8)], decide=False)


def trial(rule: Evidence, changed: float, kept: tuple[float, ...], gain: float) -> Trial:
    return Trial(rule, 200, changed, kept, gain, gain**2)


def test_the_card_has_the_setting_and_the_shares_of_kept_answers():
    chosen = Evidence(budget=1, strength=0.1, base=0)
    decision = Decision((trial(LEFT_ALONE, 0, (190.0, 150.0), 0), trial(chosen, 4, (194.0, 166.0), 9)))
    card = replace(small_targets(), decision=decision).model_card("net.trueup.safetensors")
    assert "| setting | `Evidence(budget=1, strength=0.1, base=0, least=0.05, bands=True)` |" in card
    assert "| calibrated on | 12 clean images, without labels |" in card
    assert "| sites | 1 norm, 1 activation |" in card
    assert "| clean answers kept | at least 97.5% |" in card  # 196 of 201: a new image counts as changed
    assert "clean answers that change: 2.5%" in str(decision)
    assert "| answers kept under mild perturbation | 95.0% without trueup, 97.0% with it |" in card
    assert "| answers kept under strong perturbation | 75.0% without trueup, 83.0% with it |" in card
    assert 'trueup.Targets.load("net.trueup.safetensors")' in card


def test_the_card_says_that_a_model_is_left_alone():
    few = Decision(note="fewer than 50 different images")
    assert "left as it is: fewer than 50 different images" in replace(small_targets(), decision=few).model_card()
    worse = Decision((trial(LEFT_ALONE, 0, (190.0, 150.0), 0), trial(Evidence(), 4, (180.0, 140.0), -9)))
    assert "left as it is: no setting was better and safe" in replace(small_targets(), decision=worse).model_card()


def test_the_card_says_that_nothing_was_chosen():
    assert "| setting | none was chosen; pass a rule to `trueup.correct` |" in small_targets().model_card()
