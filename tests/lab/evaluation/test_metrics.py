"""Metrics: by hand, and against published numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from trueup_lab.evaluation import metrics
from trueup_lab.evaluation.alexnet import ERRORS, EXTRA_ERRORS


def test_calibration_error_by_hand():
    """Four bins: (0.25, 0.5] holds two images, both right; (0.75, 1] three, one right; the others none."""
    confidence = torch.tensor([0.3, 0.5, 0.8, 0.9, 1.0])
    correct = torch.tensor([True, True, False, False, True])
    wanted = 100 * (2 * abs(1 - 0.4) + 3 * abs(1 / 3 - 0.9)) / 5
    assert metrics.calibration_error(confidence, correct, bins=4) == pytest.approx(wanted, abs=1e-4)


def test_an_edge_belongs_to_the_bin_below():
    """0.5 and 0.6 with two bins: one bin each, so gaps do not cancel; an edge in the bin above would."""
    both = metrics.calibration_error(torch.tensor([0.5, 0.6]), torch.tensor([True, False]), bins=2)
    assert both == pytest.approx(100 * (0.5 + 0.6) / 2, abs=1e-4)


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1))
def test_separation_is_the_area_under_the_curve(low, high):
    wanted = roc_auc_score([0] * len(low) + [1] * len(high), low + high)
    found = metrics.separation(torch.tensor(low).float(), torch.tensor(high).float())
    assert found == pytest.approx(100 * wanted)


@given(st.lists(st.tuples(st.floats(0.125, 1, width=32), st.booleans()), min_size=1, max_size=60), st.randoms())
def test_calibration_error_is_that_of_the_textbook_in_any_order(pairs, chance):
    total = 0.0
    for k in range(15):
        inside = [(c, r) for c, r in pairs if k / 15 < c <= (k + 1) / 15]
        if inside:
            n = len(inside)
            total += n / len(pairs) * abs(sum(r for _, r in inside) / n - sum(c for c, _ in inside) / n)
    shuffled = chance.sample(pairs, len(pairs))
    confidence, right = (torch.tensor(values) for values in zip(*shuffled, strict=True))
    assert metrics.calibration_error(confidence, right) == pytest.approx(100 * total, abs=1e-3)


def test_corruption_errors_by_hand():
    ce = metrics.corruption_errors({"brightness": 71.7704, "saturate": 100.0})
    assert ce["brightness"] == pytest.approx(50.0)
    assert ce["saturate"] == 0


def test_alexnet_itself_has_an_mce_of_one_hundred():
    accuracies = {name: 100 * (1 - error) for name, error in {**ERRORS, **EXTRA_ERRORS}.items()}
    assert metrics.mean_corruption_error(accuracies) == pytest.approx(100)
    assert metrics.mean_corruption_error(accuracies, extra=True) == pytest.approx(100)


def test_the_mce_is_the_mean_over_fifteen_and_the_extra_four_do_not_count():
    errors = dict.fromkeys(ERRORS, 0.0) | {"fog": 100.0} | dict.fromkeys(EXTRA_ERRORS, 50.0)
    accuracies = {name: 100 - error for name, error in errors.items()}
    assert metrics.mean_corruption_error(accuracies) == pytest.approx(100 / 0.819324 / 15)
    extra = sum(50 / error for error in EXTRA_ERRORS.values())
    assert metrics.mean_corruption_error(accuracies, extra=True) == pytest.approx((100 / 0.819324 + extra) / 19)


def test_there_are_fifteen_and_four():
    assert (len(ERRORS), len(EXTRA_ERRORS)) == (15, 4)


def test_missing_and_unknown_names_are_named():
    with pytest.raises(ValueError, match="gaussian_noise is missing"):
        metrics.mean_corruption_error({})
    with pytest.raises(ValueError, match="no error of AlexNet is published for stripe"):
        metrics.corruption_errors({"stripe": 50.0})
