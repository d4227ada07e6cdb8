"""The mathematics, against scipy, POT, NumPy and the paper's own loop."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import scipy.stats
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paper_loop import correct_row
from trueup import Correction
from trueup import functional as F

FULL = Correction(lambda1=1, lambda2=0, location="match", sparse=False)

# On a grid, so that subtracting a mean does not make equal what was not.
finite = st.integers(-100_000, 100_000).map(lambda k: k / 1000)
# Few distinct values, so that ties and zeros are common.
coarse = st.integers(-4, 4).map(float)


def by_rule(a, target, rule):
    """The correction with the numbers of a rule."""
    return F.correct(a, target, rule.step, location=rule.location, sparse=rule.sparse)


def rows(min_n=1, max_n=30):
    n = st.shared(st.integers(min_n, max_n), key="n")
    return n.flatmap(lambda n: st.lists(st.lists(coarse | finite, min_size=n, max_size=n), min_size=1, max_size=4))


def ascending(min_n=1, max_n=30):
    n = st.shared(st.integers(min_n, max_n), key="n")
    return n.flatmap(lambda n: st.lists(finite, min_size=n, max_size=n)).map(sorted)


corrections = st.builds(
    Correction,
    lambda1=st.floats(0, 1),
    lambda2=st.floats(0, 1),
    iterations=st.integers(0, 6),
    location=st.sampled_from(["keep", "match"]),
    sparse=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(a=rows(), target=ascending(), correction=corrections)
@example(a=[[0.0, -0.0, 3.0]], target=[1.0, 2.0, 3.0], correction=Correction())
def test_the_closed_form_is_the_papers_loop(a, target, correction):
    a, target = np.array(a), np.array(target)
    ours = by_rule(torch.tensor(a), torch.tensor(target), correction).numpy()
    for row, got in zip(a, ours, strict=True):
        wanted = correct_row(
            row,
            target,
            lambda1=correction.lambda1,
            lambda2=correction.lambda2,
            iterations=correction.iterations,
            location=correction.location,
            sparse=correction.sparse,
        )
        np.testing.assert_allclose(got, wanted, atol=1e-9)


def test_a_known_case_by_hand():
    # ranks of (2, 0, 5) are 1, 0, 2; means 7/3 and 4; half way: a + 0.5 (t' - a')
    a, t = torch.tensor([[2.0, 0.0, 5.0]]), torch.tensor([1.0, 3.0, 8.0])
    half = Correction(lambda1=0.5, lambda2=0, sparse=False)
    shift = 7 / 3 - 4
    wanted = [2 + (3 + shift - 2) / 2, (1 + shift) / 2, 5 + (8 + shift - 5) / 2]
    torch.testing.assert_close(by_rule(a, t, half), torch.tensor([wanted]))


@given(a=rows(), target=ascending(), correction=corrections, seed=st.integers(0, 99))
def test_equal_inputs_give_equal_outputs_wherever_they_lie(a, target, correction, seed):
    a, target = torch.tensor(a), torch.tensor(target)
    order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        by_rule(a[:, order], target, correction), by_rule(a, target, correction)[:, order], atol=0, rtol=1e-6
    )
    for row, corrected in zip(a, by_rule(a, target, correction), strict=True):
        for value in row[row != 0].unique():
            assert corrected[row == value].unique().numel() == 1


@given(a=rows(), target=ascending(), correction=corrections)
def test_order_is_kept(a, target, correction):
    a, target = torch.tensor(a, dtype=torch.float64), torch.tensor(target, dtype=torch.float64)
    dense = Correction(correction.lambda1, correction.lambda2, correction.iterations, correction.location, sparse=False)
    corrected = by_rule(a, target, dense)
    for row, got in zip(a, corrected, strict=True):
        assert (got[row.argsort()].diff() >= -1e-9).all()


@given(n=st.integers(1, 200), seed=st.integers(0, 99), location=st.sampled_from(["keep", "match"]))
def test_full_strength_lands_on_the_shape_of_the_target(n, seed, location):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(3, n, generator=generator)
    target = torch.randn(n, generator=generator).exp().sort().values
    landed = by_rule(a, target, Correction(1, 0, location=location, sparse=False)).sort(dim=1).values
    if location == "match":
        assert landed.equal(target.expand(3, n))
    else:
        shape = target - target.mean()
        torch.testing.assert_close(landed - a.mean(dim=1, keepdim=True), shape.expand(3, n), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "nothing",
    [Correction(lambda1=0), Correction(lambda2=1), Correction(iterations=0), Correction(lambda1=0, sparse=False)],
    ids=["no prior", "all likelihood", "no iteration", "not sparse"],
)
def test_a_zero_step_returns_the_same_bits_in_memory_of_its_own(nothing):
    zeros, huge = [0.0, -0.0, -0.0, 1.0, 2.0, 3.0], [3e38, 3e38, 3e38, 3e38, 3e38, 3.1e38]
    a = torch.tensor([[0.0, -0.0, 1e-45, -1.0, float("nan"), float("inf")], zeros, huge])
    corrected = by_rule(a, torch.linspace(-3e38, 3e38, 6), nothing)
    assert corrected.view(torch.int32).equal(a.view(torch.int32))
    assert corrected.data_ptr() != a.data_ptr()


def test_zeros_of_either_sign_stay_when_sparse_and_move_when_not():
    a, target = torch.tensor([[0.0, -0.0, 2.0, 4.0]]), torch.tensor([1.0, 3.0, 5.0, 7.0])
    kept = by_rule(a, target, Correction(1, 0, location="match"))
    assert kept.view(torch.int32)[0, :2].equal(a.view(torch.int32)[0, :2])
    assert kept[0, 2:].tolist() == [5.0, 7.0]  # zeros take up the two lowest ranks
    moved = by_rule(a, target, FULL)
    assert moved.tolist() == [[2.0, 2.0, 5.0, 7.0]]  # and are equal to each other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_precision_means_the_same(dtype):
    torch.manual_seed(0)
    a = torch.randn(4, 3, 8, 8).relu().to(dtype)
    target = torch.randn(192).relu().sort().values
    corrected = by_rule(a, target, Correction(1, 0.2))
    assert corrected.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for row, got in zip(a, corrected, strict=True):
        settings = {"lambda1": 1, "lambda2": 0.2, "iterations": 1, "location": "keep", "sparse": True}
        exact = correct_row(row.double().flatten().numpy(), target.double().numpy(), **settings)
        np.testing.assert_allclose(got.double().flatten(), exact, atol=tolerance, rtol=tolerance)


def test_a_target_beyond_float16_does_not_make_infinity():
    a = torch.tensor([[6e4, 1.0, 0.0]], dtype=torch.float16)
    assert by_rule(a, torch.tensor([0.0, 1e5, 2e5]), FULL).isfinite().all()


@pytest.mark.parametrize(
    "layout",
    [
        lambda a: a.contiguous(memory_format=torch.channels_last),
        lambda a: torch.stack([a, a], dim=-1)[..., 0],  # strided
        lambda a: a.flip(3).flip(3),
        lambda a: a.transpose(2, 3).contiguous().transpose(2, 3),
        lambda a: a[:1].expand(4, -1, -1, -1),  # rows that share memory
    ],
    ids=["channels last", "strided", "flipped", "transposed", "expanded"],
)
def test_the_memory_layout_does_not_matter(layout):
    torch.manual_seed(0)
    plain = torch.randn(4, 3, 6, 6).relu()
    a = layout(plain)
    before = a.clone()
    corrected = by_rule(a, torch.linspace(0, 3, 108), Correction(1, 0.2))
    reference = by_rule(a.contiguous(), torch.linspace(0, 3, 108), Correction(1, 0.2))
    assert corrected.equal(reference)
    assert a.equal(before)


def test_channels_last_stays_channels_last():
    a = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert F.correct(a, torch.linspace(0, 1, 48), 0.25).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 7), (2, 3, 4), (2, 3, 4, 5), (2, 1, 2, 3, 2), (0, 4), (3, 0)])
def test_any_shape_goes(shape):
    a = torch.randn(shape)
    corrected = by_rule(a, torch.tensor([0.0, 1.0]), FULL)
    assert corrected.shape == a.shape
    assert corrected.isfinite().all()


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    a = torch.randn(33, 5, 7, 7).relu()
    target = torch.randn(245).relu().sort().values
    for correction in (Correction(1, 0.2), Correction(0.5, 0.5, 3, "match", sparse=False)):
        together = by_rule(a, target, correction)
        alone = torch.cat([by_rule(row[None], target, correction) for row in a])
        assert together.equal(alone)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_value_that_is_not_finite_comes_back_as_it_was(poison):
    torch.manual_seed(0)
    a = torch.randn(3, 50)
    target = torch.linspace(-1, 1, 50)
    clean = by_rule(a, target, FULL)
    a[1, 7] = poison
    corrected = by_rule(a, target, FULL)
    torch.testing.assert_close(corrected[1], a[1], equal_nan=True, atol=0, rtol=0)
    assert corrected[[0, 2]].equal(clean[[0, 2]])


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e20, 1e37], ids=str)
def test_tiny_and_huge_scales(scale):
    a = torch.tensor([[3.0, 1.0, 2.0, 0.0]]) * scale
    target = torch.tensor([0.0, 10.0, 20.0, 30.0]) * scale / 10
    torch.testing.assert_close(by_rule(a, target, FULL), a)


def test_gradients_flow_through_the_correction():
    torch.manual_seed(0)
    a = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    target = torch.linspace(-1, 1, 12, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a: by_rule(a, target, Correction(1, 0.2)), (a,))


@given(n=st.integers(1, 60), m=st.integers(1, 60))
def test_a_target_of_another_length_is_read_as_a_quantile_function(n, m):
    target = np.sort(np.random.default_rng(n * 61 + m).normal(size=m))
    a = torch.randperm(n).double()[None]
    corrected = by_rule(a, torch.tensor(target), FULL)[0]
    levels = np.linspace(0, 1, n) if n > 1 else np.array([0.5])
    wanted = target if n == m else np.quantile(target, levels)
    np.testing.assert_allclose(corrected.sort().values, wanted, atol=1e-12)


def test_the_barycenter_is_the_mean_of_the_order_statistics():
    generator = np.random.default_rng(0)
    a = generator.normal(size=(7, 4, 5))
    wanted = np.sort(a.reshape(7, -1), axis=1).mean(axis=0)
    np.testing.assert_allclose(F.barycenter(torch.tensor(a)), wanted)
    spread = np.sqrt(((np.sort(a.reshape(7, -1), axis=1) - wanted) ** 2).mean(axis=0))  # the appendix's formula
    np.testing.assert_allclose(F.spread(torch.tensor(a)), spread)


def test_the_barycenter_has_the_least_sum_of_squared_distances():
    torch.manual_seed(0)
    a = torch.randn(9, 40, dtype=torch.float64)
    centre = F.barycenter(a)
    least = (F.wasserstein(a, centre, r=2) ** 2).sum()
    for _ in range(20):
        other = (centre + 0.1 * torch.randn(40, dtype=torch.float64)).sort().values
        assert (F.wasserstein(a, other, r=2) ** 2).sum() > least


@settings(deadline=None)
@given(
    a=st.lists(finite, min_size=1, max_size=25),
    b=st.lists(finite, min_size=1, max_size=25),
    r=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
)
def test_the_distance_is_that_of_scipy_and_pot(a, b, r):
    a, b = np.array(a), np.sort(b)
    ours = F.wasserstein(torch.tensor(a)[None], torch.tensor(b), r=r).item()
    assert ours == pytest.approx(ot.wasserstein_1d(a, b, p=r).item() ** (1 / r), abs=1e-6)
    if r == 1:
        assert ours == pytest.approx(scipy.stats.wasserstein_distance(a, b), abs=1e-9)


def test_the_distance_does_not_grow_with_the_number_of_values_and_the_papers_sum_does():
    a, target = torch.tensor([[1.0, 4.0]]), torch.tensor([0.0, 2.0])
    for r in (1.0, 2.0, 3.0):
        distance = F.wasserstein(a, target, r=r)
        torch.testing.assert_close(F.wasserstein(a.repeat(1, 8), target.repeat_interleave(8), r=r), distance)
        papers_sum = ((a.sort().values - target).abs() ** r).sum() ** (1 / r)
        torch.testing.assert_close(papers_sum, 2 ** (1 / r) * distance[0])
    assert F.wasserstein(a, target, r=float("inf")).tolist() == [2.0]


def test_reading_a_quantile_function_is_numpys():
    values = np.sort(np.random.default_rng(0).normal(size=(3, 17)), axis=1)
    at = np.linspace(0, 1, 50)
    wanted = np.quantile(values, at, axis=1).T
    np.testing.assert_allclose(F.quantile(torch.tensor(values), torch.tensor(at)), wanted)
    uneven = F.levels(17)
    wanted = np.stack([np.interp(at, uneven, row) for row in values])
    np.testing.assert_allclose(F.quantile(torch.tensor(values), torch.tensor(at), levels=uneven), wanted)


@pytest.mark.parametrize("m", [2, 3, 64, 1025])
def test_levels_run_from_0_to_1_and_mirror_each_other(m):
    levels = F.levels(m)
    assert levels[0] == 0
    assert levels[-1] == 1
    assert (levels.diff() > 0).all()
    torch.testing.assert_close(levels, 1 - levels.flip(0))


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda: F.correct(torch.arange(6).view(2, 3), torch.zeros(3), 0.5), "torch.int64 of shape \\(2, 3\\)"),
        (lambda: F.correct(torch.tensor(1.0), torch.zeros(3), 0.5), "\\(batch, ...\\)"),
        (lambda: F.correct(torch.zeros(2, 3), torch.zeros(3, 1), 0.5), "ascending vector, got shape \\(3, 1\\)"),
        (lambda: F.correct(torch.zeros(2, 3), torch.zeros(0), 0.5), "ascending vector"),
        (lambda: F.wasserstein(torch.zeros(2, 3), torch.zeros(3), r=0.5), "r=0.5.*at least 1"),
        (lambda: F.wasserstein(torch.zeros(2, 3), torch.zeros(3), r=float("nan")), "at least 1"),
        (lambda: F.levels(1), "at least two levels"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_came_and_what_was_wanted(call, wanted):
    with pytest.raises((TypeError, ValueError), match=wanted):
        call()
