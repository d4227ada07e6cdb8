"""The rules as values: what their numbers mean, what they refuse, how they print."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from trueup import Correction, Evidence


@pytest.mark.parametrize(
    ("correction", "step"),
    [
        (Correction(0.75, 0.25, 2), 0.668),  # the paper's settings (tables of its appendix), worked out by hand
        (Correction(0.25, 0.5, 1), 0.125),
        (Correction(0.5, 0.5, 1), 0.25),
        (Correction(1.0, 0.2, 1), 0.8),
        (Correction(0.0, 0.0, 3), 0.0),  # neither prior nor likelihood: nothing moves
        (Correction(0.3, 0.0, 1000), 1.0),  # without the likelihood it converges to the target
    ],
)
def test_the_papers_settings_are_one_number(correction, step):
    assert correction.step == pytest.approx(step, abs=5e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lambda1": 1.5}, "lambda1=1.5.*between 0 and 1"),
        ({"lambda2": float("nan")}, "lambda2=nan"),
        ({"iterations": -1}, "iterations=-1"),
        ({"iterations": 1.5}, "iterations=1.5.*whole number"),
        ({"iterations": True}, "iterations=True.*whole number"),
        ({"location": "move"}, "location='move'.*keep, match"),
        ({"method": "guess"}, "method='guess'.*auto, sort"),
    ],
)
def test_a_correction_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Correction(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budget": -0.1}, r"Evidence\(budget=-0.1\): the share of clean images.*between 0 and 1; 0.005 is careful"),
        ({"strength": 1.5}, r"Evidence\(strength=1.5\): the share of clean variance.*between 0 and 1; 0.03 is careful"),
        ({"strength": None}, r"strength=None"),
        (
            {"base": -1},
            r"Evidence\(base=-1\): the image's share in a mix.*is a number between 0 and 1; 0 asks for evidence",
        ),
        (
            {"least": 2},
            r"Evidence\(least=2\): the gate value of an image that looks clean is a number between 0 and 1; 0 leaves",
        ),
        ({"depth": 1.1}, r"Evidence\(depth=1.1\): the first share of the model's norms.*0.4 is careful"),
        ({"before_gate": -1}, r"before_gate=-1"),
        ({"bands": 1}, r"bands=1\): expected True or False"),
        ({"counts": (1, 1)}, r"counts=\(1, 1\)\): expected three positive weights"),
        ({"counts": (1, 0, 1)}, r"expected three positive weights"),
        ({"ramp": 1}, r"ramp=1.*expected ramp > 1"),
        ({"floor": 0}, r"floor=0\): expected ramp > 1 and 0 < floor"),
        ({"floor": float("nan")}, r"floor=nan"),
        ({"budget": float("nan")}, r"budget=nan"),
        ({"budget": True}, r"budget=True"),
        ({"budget": "0.1"}, r"budget='0.1'"),
    ],
)
def test_evidence_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Evidence(**fields)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"budget": np.float32(0.5), "base": np.float64(0.1)}, {"budget": 0.5, "base": 0.1}),
        ({"depth": np.int64(1)}, {"depth": 1.0}),
        ({"ramp": np.float32(10), "floor": np.float32(0.5)}, {"ramp": 10.0, "floor": 0.5}),
        ({"counts": [1, 2, 3]}, {"counts": (1.0, 2.0, 3.0)}),
        ({"counts": np.array([0.5, 1, 2], dtype=np.float32)}, {"counts": (0.5, 1.0, 2.0)}),
    ],
)
def test_numbers_of_numpy_and_lists_make_the_rule_that_plain_numbers_make(given, plain):
    rule = Evidence(**given)
    assert rule == Evidence(**plain)
    assert hash(rule) == hash(Evidence(**plain))
    assert json.dumps(dataclasses.asdict(rule)) == json.dumps(dataclasses.asdict(Evidence(**plain)))


@pytest.mark.parametrize("rule", [Correction(), Evidence()], ids=["Correction", "Evidence"])
def test_rules_are_values(rule):
    assert rule == dataclasses.replace(rule)
    assert hash(rule) == hash(dataclasses.replace(rule))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.method = "sort"


@pytest.mark.parametrize("rule", [Evidence(), Evidence(budget=1, depth=0.4), Evidence(counts=(1, 1, 1), floor=0.01)])
def test_evidence_prints_as_the_call_that_makes_it(rule):
    assert eval(repr(rule)) == rule


@pytest.mark.parametrize(
    ("rule", "changes", "gated"),
    [
        (Evidence(), True, True),
        (Evidence(budget=1), True, False),  # every image alike
        (Evidence(least=1), True, False),
        (Evidence(budget=0), True, True),  # only `least` is left
        (Evidence(budget=0, least=0), False, False),
        (Evidence(strength=0, base=0), False, False),
        (Evidence(depth=0), False, False),
    ],
)
def test_what_a_setting_switches_off(rule, changes, gated):
    assert (rule.changes, rule.gated) == (changes, gated)


@pytest.mark.parametrize(("norms", "left"), [(1, 0), (7, 0), (8, 1), (22, 1), (23, 2), (53, 4)])
def test_by_default_the_last_fifteenth_of_the_norms_is_left(norms, left):
    assert Evidence()._count_corrected(norms) == norms - left
    assert Evidence(depth=1)._count_corrected(norms) == norms
    assert Evidence(depth=0)._count_corrected(norms) == 0


@pytest.mark.parametrize(
    ("rule", "share"),
    [(Evidence(), 0.5), (Evidence(least=0.7), 0.7), (Evidence(least=0), 0), (Evidence(before_gate=0.2), 0.2)],
)
def test_before_the_gate_is_known_evidence_counts_half_or_what_every_image_has(rule, share):
    assert rule._gate_before_known == share
