"""The mathematics of evidence, against loops in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trueup.functional import evidence


def maps(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def smooth_by_hand(map_):
    """The mean over the 3 x 3 neighbours that there are, pixel by pixel."""
    height, width = map_.shape
    out = np.empty_like(map_)
    for i in range(height):
        for j in range(width):
            out[i, j] = map_[max(i - 1, 0) : i + 2, max(j - 1, 0) : j + 2].mean()
    return out


def parts_by_hand(map_, bands):
    if not bands:
        return [map_]
    low = smooth_by_hand(map_)
    return [low, map_ - low]


def realign_by_hand(a, reference, bands, gate=None):
    """The definition, one image and one channel at a time, in float64."""
    centre, spread, kappa, floor, base = (np.asarray(row, dtype=np.float64) for row in reference)
    out = np.empty(a.shape)
    for n in range(a.shape[0]):
        for c in range(a.shape[1]):
            map_ = np.asarray(a[n, c], dtype=np.float64)
            parts = parts_by_hand(map_, bands)
            found = [map_.mean(), *(0.5 * math.log(p.var() + floor[k + 1, c]) for k, p in enumerate(parts))]
            moved = []
            for k, value in enumerate(found):
                open_by = 1 if gate is None else float(gate[n])
                away, b = value - centre[k, c], base[k, c] * open_by
                z2 = (away / spread[k, c]) ** 2 * open_by
                mixed = b * away if k == 0 else math.log(math.sqrt((1 - b) * 1 + b * math.exp(away) ** 2))
                moved.append(-mixed - z2 / (z2 + kappa[k, c]) * (away - mixed))
            new = found[0] + moved[0]
            out[n, c] = new + sum(math.exp(d) * (p - p.mean()) for d, p in zip(moved[1:], parts, strict=True))
    return out


def reference(clean: Tensor, *, bands: bool, strength: float = 0.02, base: float = 0.1, counts=(1, 1, 1)) -> Tensor:
    rows = [0, 2, 3] if bands else [0, 1]
    moments = evidence.moments(clean, bands=bands)[:, rows].double()
    floor = (1e-3 * moments.mean(dim=0)).clamp(min=1e-24)
    return evidence.reference_of(
        evidence.statistics(moments, floor), floor, strength=strength, base=base, counts=counts
    )


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (1, 1),  # no neighbours
        (1, 5),  # a single row
        (2, 2),  # every pixel a corner
        (5, 4),  # odd by even
        (9, 16),
    ],
)
def test_the_local_mean_is_that_of_the_neighbours_there_are(height, width):
    x = maps(2, 3, height, width)
    wanted = np.stack([[smooth_by_hand(m) for m in image] for image in x.double().numpy()])
    np.testing.assert_allclose(evidence.local_mean(x), wanted, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 7), (4, 3, 8, 9), (4, 3, 2, 4, 5)], ids=str)
def test_moments_are_numpys(shape):
    x = maps(*shape) * 3 + 1
    over = tuple(range(2, len(shape)))
    found = evidence.moments(x)
    np.testing.assert_allclose(found[:, 0], x.double().numpy().mean(over), atol=1e-5)
    np.testing.assert_allclose(found[:, 1], x.double().numpy().var(over), atol=1e-4)


def test_the_bands_moments_are_numpys():
    x = maps(3, 2, 8, 11)
    found = evidence.moments(x, bands=True)
    for n in range(3):
        for c in range(2):
            wanted = [p.var() for p in parts_by_hand(x[n, c].double().numpy(), True)]
            np.testing.assert_allclose(found[n, 2:4, c], wanted, rtol=1e-5)
            np.testing.assert_allclose(found[n, 4, c], np.abs(parts_by_hand(x[n, c].double().numpy(), True)[1]).mean())
    assert found[:, :2].equal(evidence.moments(x))


def test_variances_far_from_zero_do_not_cancel():
    x = maps(2, 3, 16, 16)
    torch.testing.assert_close(
        evidence.moments(x + 1000, bands=True)[:, 1:], evidence.moments(x, bands=True)[:, 1:], rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize(
    ("shape", "bands"),
    [((4, 3), False), ((4, 3, 7), False), ((4, 3, 8, 9), False), ((4, 3, 8, 9), True), ((4, 3, 2, 4, 5), False)],
    ids=str,
)
def test_realigning_is_the_definition(shape, bands):
    usual = reference(maps(50, *shape[1:]), bands=bands)
    a = maps(*shape, seed=1) * torch.tensor([0.2, 1.0, 3.0, 1.0]).view(-1, *[1] * (len(shape) - 1)) + 0.5
    np.testing.assert_allclose(evidence.realign(a, usual), realign_by_hand(a, usual, bands), atol=2e-5)
    for gate in (None, torch.tensor([1.0, 0.5, 0.01, 0.0])):
        exact = evidence.realign(a.double(), usual, gate)
        assert exact.dtype == torch.float64
        np.testing.assert_allclose(exact, realign_by_hand(a.double(), usual, bands, gate), atol=1e-12)


@given(
    strength=st.floats(0.001, 0.9),
    heavy=st.floats(1.0, 3.0),
    images=st.integers(20, 200),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_kappa_takes_away_the_share_of_variance_that_was_asked_for(strength, heavy, images, seed):
    z = maps(images, 2, 3, seed=seed).double()
    z2 = z.sign().mul(z.abs() ** heavy).square()
    kappa = evidence.kappa_of(z2, strength)
    lost = (evidence.weight(z2, kappa) ** 2 * z2).mean(dim=0) / z2.mean(dim=0)
    torch.testing.assert_close(lost, torch.full_like(lost, strength), rtol=1e-4, atol=1e-6)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-3, 1e4), st.floats(0, 1))
def test_more_evidence_weighs_more_and_never_more_than_all(one, other, kappa, opened):
    less, more = sorted([one, other])
    z2, by = torch.tensor([[[less], [more]]], dtype=torch.float64), torch.tensor([opened], dtype=torch.float64)
    weights = evidence.weight(z2, torch.tensor(kappa), by)[0, :, 0]
    assert 0 <= weights[0] <= weights[1] <= 1 + 1e-12


@pytest.mark.parametrize("bands", [False, True])
def test_without_evidence_means_and_variances_are_mixed(bands):
    usual = reference(maps(50, 3, 8, 8), bands=bands, strength=0, base=0.3)
    away = torch.tensor([1.0, -2.0, 9.0], dtype=torch.float64).view(3, 1, 1)
    moved = evidence.shifts(usual[0] + away, usual)
    torch.testing.assert_close(moved[:, :1], (-0.3 * away).expand(3, 1, 3))
    # A deviation e^away times the usual one is divided by that of the mixed variance.
    mixed = (0.7 * 1 + 0.3 * away.exp().square()).sqrt()
    torch.testing.assert_close(moved[:, 1:].exp(), (1 / mixed).expand_as(moved[:, 1:]))


def test_a_base_leaves_the_deviations_that_mixing_batch_norms_statistics_leaves_and_moves_means_as_far():
    torch.manual_seed(0)
    norm, x, n = nn.BatchNorm2d(4).double().eval(), maps(3, 4, 6, 6).double() * 3 + 1, 7
    nn.init.uniform_(norm.weight, 0.5, 2)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        own_mean, own_var = x.mean(dim=(2, 3), keepdim=True), x.var(dim=(2, 3), keepdim=True, correction=0)
        mean, var, weight, bias = (
            t.detach()[:, None, None] for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        )
        mean, var = (n * mean + own_mean) / (n + 1), (n * var + own_var) / (n + 1)
        mixed = (x - mean) / (var + norm.eps).sqrt() * weight + bias
        centre = torch.stack([norm.bias, norm.weight.log()])
        ones = torch.ones_like(centre)
        usual = torch.stack([centre, ones, ones * torch.inf, ones * 0, ones / (n + 1)])
        moved = evidence.realign(norm(x), usual)
    torch.testing.assert_close(moved.std(dim=(2, 3)), mixed.std(dim=(2, 3)), rtol=1e-4, atol=0)  # an epsilon apart
    # Mixing divides what is left of a mean's distance too.
    left = (mixed - centre[0][:, None, None]).mean(dim=(2, 3)) * norm(x).std(dim=(2, 3)) / mixed.std(dim=(2, 3))
    torch.testing.assert_close(moved.mean(dim=(2, 3)) - centre[0], left, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("base", [0.0, 1.0])
def test_a_mix_of_nothing_moves_nothing_and_one_of_all_moves_all_the_way(base):
    away = torch.tensor([0.5, -19.0, 19.0, 1e-4]).view(1, 4, 1)
    torch.testing.assert_close(evidence.mix(away, torch.tensor(base)), base * away)


@pytest.mark.parametrize("bands", [False, True])
def test_counts_weigh_the_evidence_of_each_kind_of_statistic(bands):
    counts = [0.25, 0.5, 1.0][: 3 if bands else 2]
    usual = reference(maps(50, 3, 8, 8), bands=bands, strength=0.1, base=0, counts=(0.25, 0.5, 1.0))
    moments = evidence.moments(maps(50, 3, 8, 8), bands=bands)[:, [0, 2, 3] if bands else [0, 1]].double()
    z2 = evidence.z_squared(evidence.statistics(moments, usual[3]), usual)
    torch.testing.assert_close(usual[2] * torch.tensor(counts)[:, None], evidence.kappa_of(z2, 0.1))


def test_the_share_of_nuisance_is_weighed_by_its_mean_over_all_statistics_of_the_norm():
    drift = torch.tensor([[1.0, 3.0], [0.0, 1.0]])
    shares = torch.tensor([[0.5, 0.75], [0.0, 0.5]])  # of a variance of 1; their mean is 0.4375
    wanted = (0.4375 * shares).clamp(min=1e-4)
    torch.testing.assert_close(evidence.nuisance_share(drift, torch.ones(2, 2)), wanted)


def test_what_is_the_same_in_all_clean_images_is_not_moved():
    floor = torch.full((2, 3), 1e-3, dtype=torch.float64)
    usual = evidence.reference_of(torch.ones(20, 2, 3, dtype=torch.float64), floor, strength=0.5, base=0.5)
    assert (evidence.shifts(torch.full((1, 2, 3), 7.0, dtype=torch.float64), usual) == 0).all()


def test_a_base_is_as_exact_as_the_statistics():
    usual = reference(maps(50, 3, 8, 8).double(), bands=False, base=0.1)
    assert usual[4].unique().tolist() == [0.1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("base", [0.0, 0.1, 1.0])
def test_a_mix_ends_where_exponentials_would(base, dtype):
    away = torch.tensor([[[0.0], [50.0], [-50.0], [500.0]]], dtype=dtype)
    moved = evidence.mix(away, torch.tensor(base, dtype=dtype))[0, :, 0]
    at_end = {0.0: (0.0, 0.0), 0.1: (20 + math.log(0.1) / 2, math.log(0.9) / 2), 1.0: (20.0, -20.0)}[base]
    torch.testing.assert_close(moved, torch.tensor([0, at_end[0], at_end[1], at_end[0]], dtype=dtype))


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(0.05, 20), shift=st.floats(-5, 5), bands=st.booleans(), seed=st.integers(0, 99))
def test_no_statistic_moves_away_from_its_centre_or_past_it(scale, shift, bands, seed):
    usual = reference(maps(60, 2, 8, 8), bands=bands)
    found = evidence.statistics(
        evidence.moments(maps(5, 2, 8, 8, seed=seed).double() * scale + shift, bands=bands)[
            :, [0, 2, 3] if bands else [0, 1]
        ],
        usual[3],
    )
    gap = usual[0] - found
    moved = evidence.shifts(found, usual)
    assert (moved * gap >= 0).all()
    assert (moved.abs() <= gap.abs()).all()


def test_full_strength_lands_on_the_centre():
    clean = maps(60, 4, 9, 9).double()
    usual = reference(clean, bands=False, strength=1, base=0)
    usual[3] = 1e-24  # the floor is felt as well
    landed = evidence.moments(evidence.realign(maps(5, 4, 9, 9, seed=3).double() * 7 - 2, usual))
    found = evidence.statistics(landed, usual[3])
    torch.testing.assert_close(found, usual[0].expand_as(found), atol=1e-4, rtol=1e-4)


def test_noise_is_taken_from_the_high_band_and_blur_given_back_to_it():
    coarse = torch.nn.functional.interpolate(maps(80, 3, 4, 4), size=16, mode="bilinear", align_corners=False)
    clean = coarse + 0.2 * maps(80, 3, 16, 16, seed=1)
    usual = reference(clean, bands=True)
    high = evidence.moments(clean, bands=True)[:, 3].mean()
    for changed in (clean + 0.6 * maps(80, 3, 16, 16, seed=2), evidence.local_mean(clean)):
        before = evidence.moments(changed, bands=True)[:, 3].mean()
        after = evidence.moments(evidence.realign(changed, usual), bands=True)[:, 3].mean()
        assert (after / high).log().abs() < 0.5 * (before / high).log().abs()


class TestWhatStays:
    @pytest.mark.parametrize("bands", [False, True])
    def test_an_image_that_is_not_open_keeps_its_bits_beside_one_that_is(self, bands):
        usual, x = reference(maps(50, 5, 12, 12), bands=bands), maps(4, 5, 12, 12, seed=4) * 3
        out = evidence.realign(x, usual, torch.tensor([0.0, 1.0, 0.3, 0.0]))
        assert out[[0, 3]].equal(x[[0, 3]])
        assert out[1].equal(evidence.realign(x, usual)[1])
        less, more = ((out[2] - x[2]).norm(), (evidence.realign(x, usual)[2] - x[2]).norm())
        assert 0 < less < more

    @pytest.mark.parametrize("bands", [False, True])
    def test_an_image_has_one_answer_in_any_batch_to_the_bit(self, bands):
        usual, x = reference(maps(50, 5, 12, 12), bands=bands), maps(7, 5, 12, 12, seed=4) * 2
        together = evidence.realign(x, usual)
        assert torch.cat([evidence.realign(image[None], usual) for image in x]).equal(together)
        assert evidence.realign(x.flip(0), usual).flip(0).equal(together)

    @pytest.mark.parametrize("bands", [False, True])
    @pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
    def test_a_channel_that_is_not_finite_comes_back_as_it_is_and_spoils_no_other(self, bands, poison):
        usual, x = reference(maps(50, 5, 12, 12), bands=bands), maps(3, 5, 12, 12, seed=4) * 2
        clean = evidence.realign(x, usual)
        x[1, 2, 3, 4] = poison
        out = evidence.realign(x, usual)
        assert out[1, 2].nan_to_num(9).equal(x[1, 2].nan_to_num(9))
        out[1, 2] = clean[1, 2]
        assert out.equal(clean)

    def test_a_constant_map_stays_constant(self):
        usual = reference(maps(50, 2, 8, 8), bands=True)
        out = evidence.realign(torch.full((1, 2, 8, 8), 3.0), usual)
        assert out.isfinite().all()
        assert (out - out[..., :1, :1]).abs().max() == 0

    def test_a_channel_without_spread_is_left_alone(self):
        clean = maps(50, 3, 8, 8)
        clean[:, 1] = 0.25  # such as a norm whose scale is zero
        x = maps(4, 3, 8, 8, seed=2) + 5
        out = evidence.realign(x, reference(clean, bands=True))
        torch.testing.assert_close(out[:, 1], x[:, 1])
        assert (out[:, 0] - x[:, 0]).abs().max() > 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_computed_in_single(self, dtype):
        usual, x = reference(maps(50, 3, 8, 8), bands=True), (maps(4, 3, 8, 8) * 3).to(dtype)
        out = evidence.realign(x, usual)
        assert out.dtype == dtype
        assert out.equal(evidence.realign(x.float(), usual).to(dtype))

    def test_values_as_large_as_floats_go_do_not_make_nan(self):
        usual = reference(maps(50, 3, 8, 8), bands=True)
        for size in (1e15, 1e25, 1e38):
            assert not evidence.realign(maps(1, 3, 8, 8) * size, usual).isnan().any()

    @pytest.mark.parametrize("bands", [False, True])
    def test_it_can_be_differentiated(self, bands):
        clean = maps(20, 2, 8, 8).double()
        clean[:, 1] = 0.5
        usual = reference(clean, bands=bands)
        x = maps(1, 2, 8, 8, seed=1).double().requires_grad_()
        assert torch.autograd.gradcheck(lambda a: evidence.realign(a, usual), x)
        for gate in (torch.tensor([0.0]), torch.tensor([0.4])):
            assert torch.autograd.gradcheck(lambda a, gate=gate: evidence.realign(a, usual, gate), x)
        constant = torch.ones(1, 2, 8, 8, requires_grad=True)
        evidence.realign(constant, usual).sum().backward()
        assert constant.grad.isfinite().all()


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, 2, dtype=torch.int64)], ids=["no channels", "integers"])
def test_what_has_no_channels_is_refused(bad):
    with pytest.raises(TypeError, match=r"expected floating-point activations \(batch, channels, ...\)"):
        evidence.moments(bad)
