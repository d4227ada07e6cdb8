"""The drift test: false alarms are as rare as promised, at any time; drift is found, and dated."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from trueup.functional import gate
from trueup.monitor import drift
from trueup.monitor.drift import BETS, DriftTest, capital_left, gaps_of, log_cumulative_sums


def gaps(held, scores):
    """By definition: how many held-out scores lie beyond an image's."""
    return (held[None, :] > scores[:, None]).sum(axis=1)


def run(held, scores, false_alarm=0.001):
    test = DriftTest(len(held), false_alarm=false_alarm)
    test.step(gaps(held, scores), np.arange(len(scores), dtype=float))
    return test


@pytest.mark.parametrize("held", [9, 60])  # a false alarm is likeliest where calibration says least
def test_clean_streams_raise_false_alarms_no_more_often_than_promised_however_often_one_looks(held):
    rng, streams, promised = np.random.default_rng(0), 600, 0.2
    alarms = sum(run(rng.normal(size=held), rng.normal(size=600), promised).alarm is not None for _ in range(streams))
    assert alarms / streams < promised + 3 * math.sqrt(promised * (1 - promised) / streams)
    assert alarms > 0.01 * streams  # the test does bet


def test_ranking_among_the_held_out_images_alone_would_raise_false_alarms():
    """The reason for the urn: with the same bets on such ranks, most clean streams end in an alarm."""
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(60):
        held, scores = rng.normal(size=60), rng.normal(size=4000)
        low = gaps(held, scores)[:, None] / 61
        share, power = np.array(BETS).T
        paid = 1 - share + share * ((low + 1 / 61) ** power - low**power) * 61
        capital = np.exp(np.cumsum(np.log(paid), axis=0)).mean(axis=1)
        alarms += capital.max() > 1 / 0.2
    assert alarms > 0.35 * 60


def test_a_bet_is_fair_in_the_urn():
    """Over all gaps, weighted by the urn's probabilities, each bet pays 1: by enumeration."""
    rng = np.random.default_rng(1)
    test = DriftTest(7)
    test.step(rng.integers(0, 8, size=23), np.zeros(23))
    assert test.balls.sum() == 8 + 23
    paid = np.stack([test._returns(np.array([gap]))[:, 0] for gap in range(8)])
    np.testing.assert_allclose((test.balls / test.balls.sum()) @ paid, 1)


def test_a_bet_pays_the_mean_of_its_density_over_the_interval_of_the_gap():
    test = DriftTest(4)
    test.step(np.array([1, 1, 3]), np.zeros(3))  # balls: 1, 3, 1, 2, 1
    for gap, (low, high) in enumerate([(0, 1), (1, 4), (4, 5), (5, 7), (7, 8)]):
        for k, (share, power) in enumerate(BETS):
            density = lambda u, s=share, e=power: 1 - s + s * e * u ** (e - 1)  # noqa: E731
            wanted = integrate.quad(density, low / 8, high / 8)[0] * 8 / (high - low)
            assert test._returns(np.array([gap]))[k, 0] == pytest.approx(wanted, rel=1e-6)


def slow_capital(balls, sequence):
    """The capital after each image, by running every bet from every start on its own."""
    balls, bets, e_values = list(balls), [], []
    for number, gap in enumerate(sequence):
        start = float(capital_left(np.array(number)) - capital_left(np.array(number + 1)))
        bets += [[start / len(BETS), share, power] for share, power in BETS]
        total, low = sum(balls), sum(balls[:gap])
        a, b = low / total, (low + balls[gap]) / total
        for bet in bets:
            bet[0] *= 1 - bet[1] + bet[1] * (b ** bet[2] - a ** bet[2]) / (b - a)
        balls[gap] += 1
        e_values.append(sum(bet[0] for bet in bets) + float(capital_left(np.array(number + 1))))
    return e_values


@settings(max_examples=30, deadline=None)
@given(sequence=st.lists(st.integers(0, 5), min_size=1, max_size=40), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_the_capital_is_that_of_all_bets_together_and_splits_do_not_matter(sequence, cuts):
    wanted = slow_capital([1] * 6, sequence)
    test = DriftTest(5)
    edges = sorted({0, len(sequence), *(cut for cut in cuts if cut < len(sequence))})
    for a, b in pairwise(edges):
        test.step(np.array(sequence[a:b]), np.arange(a, b, dtype=float))
    assert test.log_e == pytest.approx(math.log(wanted[-1]), abs=1e-9)
    assert test.log_largest == pytest.approx(max(0, *map(math.log, wanted)), abs=1e-9)


def test_chunks_and_an_interruption_do_not_matter(monkeypatch):
    rng = np.random.default_rng(3)
    held = rng.normal(size=50)
    scores = np.concatenate([rng.normal(size=700), 2 + rng.normal(size=60)])
    whole = run(held, scores)
    monkeypatch.setattr(drift, "CHUNK", 7)
    test = DriftTest(50)
    for part in np.array_split(np.arange(len(scores)), 9):
        test.step(gaps(held, scores[part]), part.astype(float))
        test = DriftTest.from_state(json.loads(json.dumps(test.state())))
    assert test.log_e == pytest.approx(whole.log_e)
    assert test.alarm == whole.alarm
    assert test.since == whole.since


@pytest.mark.parametrize("clean", [0, 3000])
@pytest.mark.parametrize(("shift", "within"), [(3.0, 25), (1.0, 150)])
def test_drift_is_found_soon_and_dated(clean, shift, within):
    rng = np.random.default_rng(4)
    held = rng.normal(size=256)
    test = run(held, np.concatenate([rng.normal(size=clean), shift + rng.normal(size=400)]))
    assert test.alarm is not None
    assert clean < test.alarm.image <= clean + within
    assert abs(test.alarm.since - clean) <= within / 2


def test_a_few_broken_images_among_clean_ones_are_found():
    rng = np.random.default_rng(5)
    scores = rng.normal(size=3000)
    scores[1000::20] += 10
    test = run(rng.normal(size=256), scores)
    assert test.alarm is not None
    assert test.alarm.image > 1000


def test_the_gap_is_read_from_the_p_value():
    clean = np.random.default_rng(0).normal(size=(60, 3))
    fitted = gate.fit(torch.tensor(clean))
    held = fitted.held.numpy()
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    p = fitted.p_values(x).float().double().numpy()
    np.testing.assert_array_equal(gaps_of(p, len(held)), gaps(held, fitted.scores(x).numpy()))
    assert gaps_of(np.array([0.0, np.nan]), 30).tolist() == [0, 0]


@pytest.mark.parametrize("step", [0.3, -0.5, 5.0])  # 5: wider than exponentials can hold, so the slow way is taken
def test_cumulative_sums_of_logarithms_lose_nothing(step):
    rng = np.random.default_rng(0)
    logs = rng.normal(size=(3, 900)) + step * np.arange(900)
    logs[:, 0] = [-np.inf, 1.0, -np.inf]  # no bet has started
    np.testing.assert_allclose(log_cumulative_sums(logs), np.logaddexp.accumulate(logs, axis=1), rtol=1e-12, atol=1e-9)
