"""The mathematics of the gate, against scipy and numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trueup.functional import evidence, gate


def draws(images: int, d: int, seed: int = 0, *, heavy: float = 1.0, ties: bool = False) -> Tensor:
    """Correlated features, some of them skew or heavy in the tails, or often equal."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((images, d)) @ np.random.default_rng(99).standard_normal((d, d)) / d**0.5
    x = np.sign(x) * np.abs(x) ** heavy
    x[:, 0] = np.exp(x[:, 0] / 3)
    if ties:
        x[:, -1] = np.maximum(x[:, -1], 0)
    return torch.from_numpy(x)


def shrinkage_by_hand(z):
    """Schäfer and Strimmer's estimate, entry by entry."""
    n, d = z.shape
    up = down = 0.0
    for i in range(d):
        for j in range(d):
            if i != j:
                products = z[:, i] * z[:, j]
                up += products.var() / n
                down += products.mean() ** 2
    return min(max(up / down, 1e-3), 1.0)


def scores_by_hand(known, x):
    """Normal scores at 65 knots, then a squared Mahalanobis distance, by scipy and numpy."""
    n, d = known.shape
    top = scipy.stats.norm.ppf(1 - 0.5 / n)
    levels = np.linspace(-top, top, 65)
    k = int(np.argmax(scipy.stats.norm.cdf(levels) >= 0.98))

    def normal(values):
        z = np.empty(values.shape)
        for j in range(d):
            at = scipy.stats.norm.cdf(levels) * n - 0.5
            knots = np.interp(at, np.arange(n), np.sort(known[:, j]))
            above, below = (knots[k] - knots[32]) / levels[k], (knots[32] - knots[-1 - k]) / levels[k]
            z[:, j] = np.interp(values[:, j], knots, levels)
            z[:, j] += np.maximum(values[:, j] - knots[-1], 0) / above
            z[:, j] -= np.maximum(knots[0] - values[:, j], 0) / below
        return z

    z, own = normal(known), normal(x)
    covariance, share = np.cov(z.T, bias=True), shrinkage_by_hand(z - z.mean(0))
    covariance = (1 - share) * covariance + share * np.diag(np.diag(covariance))
    away = own - z.mean(0)
    return np.einsum("ni,ij,nj->n", away, np.linalg.inv(covariance), away) / d


@pytest.mark.parametrize(
    ("images", "d"),
    [
        (100, 3),
        (2000, 12),
        (60, 40),  # fewer images to fit than features
    ],
)
@pytest.mark.parametrize("heavy", [1.0, 2.0])
def test_a_gate_is_the_definition(images, d, heavy):
    clean, x = draws(images, d, heavy=heavy), 2 * draws(50, d, seed=1, heavy=heavy)
    fitted = gate.fit(clean)
    wanted = scores_by_hand(clean[::2].numpy(), x.numpy())
    np.testing.assert_allclose(fitted.scores(x), wanted, rtol=1e-8)
    held = scores_by_hand(clean[::2].numpy(), clean[1::2].numpy())
    np.testing.assert_allclose(fitted.held, np.sort(held), rtol=1e-8)
    held, n = np.sort(held), len(held)
    p = np.interp(wanted, [*held, 2 * held[-1]], np.arange(n + 1, 0, -1) / (n + 1))
    np.testing.assert_allclose(fitted.p_values(x), p, rtol=1e-6)
    steps = np.array([(1 + (held >= score).sum()) / (n + 1) for score in wanted])
    assert (p >= steps).all()
    assert (p <= steps + 1 / (n + 1)).all()


@pytest.mark.parametrize("images", [4, 24, 400])
def test_rounding_does_not_decide_the_gate_value(images):
    """An image as far away as one that is held out, to the last bit and a little farther."""
    fitted = gate.fit(draws(images, 3))
    x = draws(images, 3)[1::2]
    for share in (1 - 1e-9, 1 + 1e-9):
        near = fitted.p_values(x * share)
        torch.testing.assert_close(near, fitted.p_values(x), rtol=1e-4, atol=0)
        torch.testing.assert_close(
            gate.gate_values(near, 0.02, 20), gate.gate_values(fitted.p_values(x), 0.02, 20), rtol=0, atol=1e-4
        )


def test_scores_of_clean_images_are_normal():
    clean = draws(4000, 5, heavy=2.0)
    fitted = gate.fit(clean)
    z = gate.normal_scores(clean[::2], fitted.knots, fitted.tails, fitted.top)
    for column in z.T:
        assert scipy.stats.kstest(column.numpy(), "norm").statistic < 0.03
    assert abs(float(fitted.held.mean()) - 1) < 0.1


@settings(max_examples=25, deadline=None)
@given(
    images=st.sampled_from([40, 200, 1000]),
    d=st.integers(2, 12),
    heavy=st.sampled_from([0.5, 1.0, 3.0]),
    ties=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_p_values_of_exchangeable_images_are_valid(images, d, heavy, ties, seed):
    """Of new clean images, at most a share α has p <= α, over the images that are held out and the new ones."""
    rounds, fresh = 20, 50
    data = draws(rounds * (images + fresh), d, seed, heavy=heavy, ties=ties).view(rounds, images + fresh, d)
    p = torch.stack([gate.fit(part[:images]).p_values(part[images:]) for part in data])
    for level in (0.02, 0.1, 0.4):
        # The variance of the share in a round: of the level that the held-out images fix, and of the new images.
        variance = level * (1 - level) * (1 / (images // 2) + 1 / fresh) / rounds
        assert (p <= level).double().mean() <= level + 4.5 * variance**0.5 + 1e-9


@given(
    p=st.lists(st.floats(0, 1), min_size=2, max_size=20).map(sorted),
    budget=st.floats(1e-6, 1),
    ramp=st.sampled_from([2.0, 20.0, 100.0]),
)
def test_the_gate_closes_as_an_image_gets_more_usual_and_is_shut_from_ramp_budgets_on(p, budget, ramp):
    p = torch.tensor(p, dtype=torch.float64)
    opened = gate.gate_values(p, budget, ramp)
    assert (opened.diff() <= 0).all()
    assert (opened >= 0).all()
    assert (opened <= 1).all()
    assert (opened[p <= budget] > 1 - 1e-12).all()
    assert (opened[p >= ramp * budget] == 0).all()
    wanted = [min(max(math.log(ramp * budget / q) / math.log(ramp), 0), 1) if q > 0 else 1 for q in p.tolist()]
    np.testing.assert_allclose(opened, wanted, atol=1e-12)


def test_an_image_that_was_seen_twice_is_not_held_out_from_a_fit_to_itself():
    """Other held-out images leave the fit as it is, whichever of an image's copies they are."""
    clean, other = torch.randn(2, 40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    names = torch.arange(40).repeat_interleave(torch.tensor([1, 1, 2, 2]).repeat(10))
    held = (names % 2 == 1)[:, None]
    first, second = gate.fit(clean[names], names), gate.fit(torch.where(held, other[names], clean[names]), names)
    assert all(a.equal(b) for a, b in zip(first[:-1], second[:-1], strict=True))
    assert not first.held.equal(second.held)
    assert len(first.held) == int(held.sum())


def test_the_features_are_numpys():
    a = torch.randn(4, 3, 9, 12, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.5, 1, 2]).view(3, 1, 1)
    moments, floor = evidence.moments(a, bands=True), torch.full((5, 3), 1e-3, dtype=torch.float64)
    low = evidence.local_mean(a).double().numpy()
    high, a = a.double().numpy() - low, a.double().numpy()
    over = (2, 3)
    deviations = [0.5 * np.log(part.var(over) + 1e-3) for part in (low, high)]
    even = 0.5 * np.log(np.abs(high).mean(over) ** 2 + 2 / np.pi * 1e-3) - deviations[1]
    wanted = np.concatenate([a.mean(over), *deviations, even], axis=1)
    np.testing.assert_allclose(gate.features(moments, floor), wanted, atol=1e-5)
    plain = np.concatenate([a.mean(over), 0.5 * np.log(a.var(over) + 1e-3)], axis=1)
    np.testing.assert_allclose(gate.features(moments[:, :2], floor[:2]), plain, atol=1e-5)


def test_a_map_without_detail_is_as_even_as_noise():
    moments = evidence.moments(torch.zeros(1, 1, 8, 8), bands=True)
    found = gate.features(moments, torch.full((5, 1), 1e-3))
    assert found[0, 3] == pytest.approx(0.5 * math.log(2 / math.pi))


class TestWhatSaysNothing:
    def test_a_feature_that_never_varies_contributes_nothing(self):
        clean, x = draws(200, 4), draws(30, 4, seed=1)
        wider = [torch.cat([t, torch.full((len(t), 1), value)], dim=1) for t, value in ((clean, 0.7), (x, 0.7), (x, 9))]
        fitted = gate.fit(wider[0])
        for other in wider[1:]:
            torch.testing.assert_close(fitted.scores(other) * 5 / 4, gate.fit(clean).scores(x))

    def test_a_feature_that_hardly_varies_does_not_make_everything_infinite(self):
        clean = draws(200, 3)
        clean[:, 1] = 0.0
        clean[7, 1] = 1.0  # odd ranks are held out
        clean[8, 1] = 1.0
        x = clean[:1].expand(4, -1).clone()
        x[1:, 1] = torch.tensor([2.0, 20.0, -20.0])
        found = gate.fit(clean).scores(x)
        assert found.isfinite().all()
        assert found[0] < found[1] < found[2]  # a step is that of the whole range, where there is no other
        assert found[0] < found[3]

    def test_features_that_repeat_one_another_count_once(self):
        clean, x = (torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).double() for n in (4000, 20))
        once, twice = (gate.fit(torch.cat([clean] * k, 1)).scores(torch.cat([x] * k, 1)) * 3 * k for k in (1, 2))
        torch.testing.assert_close(twice, once, rtol=0.02, atol=0.02)

    @pytest.mark.parametrize("images", [1, 2, 3, 10])
    def test_a_few_images_open_the_gate_as_far_as_they_can_tell(self, images):
        p = gate.fit(draws(images, 3)).p_values(draws(1, 3, seed=1) + 1e3)
        if images < 4:  # one or two images to fit do not tell how far is far, or none ranks
            assert 1 / (images // 2 + 1) <= p <= 1
        else:
            assert p == 1 / (images // 2 + 1)

    @pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
    def test_an_image_that_is_not_finite_is_entirely_unusual_and_spoils_no_other(self, poison):
        x = draws(3, 4, seed=1)
        fitted = gate.fit(draws(100, 4))
        wanted = fitted.p_values(x)
        x[1, 2] = poison
        found = fitted.p_values(x)
        assert found[1] == 0
        assert gate.gate_values(found, 1e-6, 20)[1] == 1
        assert found[[0, 2]].equal(wanted[[0, 2]])

    def test_equal_values_have_the_middle_of_their_scores(self):
        clean = torch.zeros(400, 1, dtype=torch.float64)
        clean[:100] = -torch.arange(1, 101, dtype=torch.float64)[:, None]
        fitted = gate.fit(clean)
        z = gate.normal_scores(torch.zeros(1, 1), fitted.knots, fitted.tails, fitted.top)
        levels = np.linspace(-float(fitted.top), float(fitted.top), 65)
        first = int(np.argmax(scipy.stats.norm.cdf(levels) * 200 - 0.5 >= 50))  # a quarter lies below
        assert float(z) == pytest.approx((levels[first] + levels[-1]) / 2)
        fitted = gate.fit(-clean)  # and now a tie from the bottom on
        z = gate.normal_scores(torch.tensor([[0.0], [-1.0]]), fitted.knots, fitted.tails, fitted.top)
        assert float(z[0]) == pytest.approx((levels[0] + levels[-1 - first]) / 2)
        assert float(z[1]) == pytest.approx(levels[0] - (1 + float(fitted.knots[0, 0])) / float(fitted.tails[1]))

    @given(
        level=st.sampled_from([-5.0, 0.0, 1.0]),
        rounding=st.sampled_from([-1e-6, -1e-9, 1e-9, 1e-6]),
        seed=st.integers(0, 10_000),
    )
    def test_rounding_hardly_moves_the_scores_where_many_images_are_equal(self, level, rounding, seed):
        clean, x = draws(600, 4, seed), draws(20, 4, seed + 1)
        for part in (clean, x):
            part[torch.rand(len(part), generator=torch.Generator().manual_seed(seed)) < 0.6, 2] = level
        fitted, moved = gate.fit(clean), x.clone()
        moved[:, 2] += rounding * (clean[:, 2].max() - clean[:, 2].min())
        torch.testing.assert_close(fitted.scores(moved), fitted.scores(x), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(fitted.p_values(moved), fitted.p_values(x), rtol=0, atol=0.01)

    def test_rounding_moves_a_score_by_a_knot_at_most_where_other_images_are_nearly_equal(self):
        clean = draws(600, 1)
        clean[:360], clean[360:480] = 1.0, 1 + 1e-9
        fitted = gate.fit(clean)
        x = torch.tensor([[1.0], [1 + 1e-9], [1 + 1e-8], [1 - 1e-8]], dtype=torch.float64)
        z = gate.normal_scores(x, fitted.knots, fitted.tails, fitted.top)
        assert z.max() - z.min() < 1.1 * 2 * fitted.top / 64

    def test_knots_that_differ_stay_as_they_are(self):
        clean = draws(400, 4)
        dead = clean.clone()
        dead[:240, 2] = -1.0
        kept, spread = gate.fit(clean).knots, gate.fit(dead).knots
        assert spread[[0, 1, 3]].equal(kept[[0, 1, 3]])
        assert (spread.diff(dim=1) > 0).all()
