"""`measure`: the distance is the distance, and ranks tell unusual images."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import trueup
from architectures import images, make
from trueup import functional as F
from trueup import kernels
from trueup._measure import Meter
from trueup.targets.norm import NormTarget, condensed


def traced(monkeypatch):
    """The models that are traced from here on."""
    models, trace = [], fx.Tracer.trace
    monkeypatch.setattr(
        fx.Tracer, "trace", lambda self, *args, **kw: models.append(args[0]) or trace(self, *args, **kw)
    )
    return models


def test_the_distance_is_the_wasserstein_distance_of_each_image_at_each_site():
    model, x = make("vgg"), images(5, seed=9)
    targets = trueup.calibrate(model, [images(40)], resolution=None, decide=False)
    shift = trueup.measure(model, targets, x)
    assert shift.activations == ("1", "4", "7", "11")
    a = model[:2](x).detach()
    torch.testing.assert_close(shift.distance[:, 0], F.wasserstein(a, targets.activations["1"].target.float()))
    assert shift.distance.shape == shift.activation_rank.shape == (5, 4)


def test_shifted_images_are_unusual_and_clean_ones_are_not():
    model = make("resnet")
    everything = images(600)
    targets = trueup.calibrate(model, everything[:400].split(100), decide=False)
    clean = trueup.measure(model, targets, everything[400:])
    assert (clean.activation_rank.mean(dim=0) - 0.5).abs().max() < 0.08
    assert ((clean.activation_rank > 0.9).float().mean(dim=0) < 0.2).all()
    noisy = everything[400:] + torch.randn_like(everything[400:])
    assert (trueup.measure(model, targets, noisy).activation_rank[:, 0] > 0.95).float().mean() > 0.9


def test_the_evidence_is_the_mean_of_squared_distances_in_spreads():
    """By hand, from the definition, at a norm without bands."""
    model, clean, x = make("vit"), images(60), images(5, seed=9) * 2
    targets = trueup.calibrate(model, [clean], decide=False)
    shift = trueup.measure(model, targets, x)
    assert shift.norms == ("blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2")

    def statistics(images):
        tokens = model.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([model.token.expand(len(images), -1, -1), tokens], dim=1) + model.positions
        y = model.blocks[0].norm1(tokens).detach().double()
        return y.mean(1), y.var(1, correction=0)

    (mean, var), (own_mean, own_var) = statistics(clean), statistics(x)
    floor = 1e-3 * var.mean(0)
    total = 0.0
    for usual, own in ((mean, own_mean), (0.5 * (var + floor).log(), 0.5 * (own_var + floor).log())):
        total = total + ((own - usual.mean(0)) / usual.std(0, correction=0)).square().mean(1) / 2
    torch.testing.assert_close(shift.evidence[:, 0], total.float(), rtol=2e-2, atol=1e-2)  # three digits are kept


@pytest.mark.parametrize("bands", [False, True])
def test_a_clean_image_has_the_evidence_that_it_has_against_the_others(bands):
    """By leaving each of them out in turn."""
    a = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    moments = kernels.moments(a, bands=bands)[:, :4]
    total = moments.sum(dim=0, dtype=torch.float64)
    target = NormTarget(shape=(3, 8, 8), total=total, images=12, sample=condensed(moments))
    for k, found in enumerate(target.clean_evidence()):
        others = replace(target, sample=target.sample[torch.arange(12) != k])
        torch.testing.assert_close(found, others.mean_evidence(a[k : k + 1])[0], rtol=2e-2, atol=1e-2)


def test_an_image_farther_than_n_clean_ones_takes_the_last_of_n_plus_1_places():
    model = make("resnet")
    targets = trueup.calibrate(model, [images(9)], decide=False)
    shift = trueup.measure(model, targets, 100 * images(2, seed=1))
    for ranks in (shift.norm_rank, shift.activation_rank):
        assert ranks.max() == torch.tensor(9 / 10)


def test_ranks_are_calibrated_on_clean_images_that_were_not_seen():
    model = make("resnet")
    everything = images(2500)
    targets = trueup.calibrate(model, everything[:500].split(100), decide=False)
    parts = [trueup.measure(model, targets, part) for part in everything[500:].split(500)]
    for name, ranked in (("norm_rank", 500), ("image_rank", 250)):
        ranks = torch.cat([getattr(part, name) for part in parts])
        for level in (0.5, 0.9, 0.99):
            above = (ranks > level).float().mean(dim=0)
            # Of the ranked clean images the k highest fix the level: a Beta distribution, and what 2000 say of it.
            error = 4 * (level * (1 - level) * (1 / ranked + 1 / 2000)) ** 0.5
            assert ((above - (1 - level)).abs() < error + 1 / (ranked + 1)).all(), (name, level, above)
    noisy = everything[500:700] + 0.5 * torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert (trueup.measure(model, targets, noisy).image_rank > 0.99).float().mean() > 0.9


def test_the_image_is_ranked_by_what_opens_the_gate_selected_or_not():
    model, x = make("resnet"), torch.cat([images(20, seed=3), images(20, seed=3) * 0.5])
    targets = trueup.calibrate(model, images(200).split(50), decide=False)
    rule = trueup.Evidence(least=0)  # else early norms are corrected before the gate looks
    robust = trueup.correct(model, targets, rule)
    seen = []
    robust.combine.register_forward_hook(lambda _m, _i, out: seen.append(out))
    robust(x)
    shift = trueup.measure(model, targets, x)
    assert F.gate.gate_values(1 - shift.image_rank, rule.budget, rule.ramp).allclose(seen[0], atol=1e-5)
    late = trueup.measure(model, targets, x, select=lambda site: site.name == "layer1.1.bn3")
    assert late.norms == ("layer1.1.bn3",)
    assert late.activations == ()
    assert late.image_rank.equal(shift.image_rank)


def test_an_image_that_is_not_finite_is_entirely_surprising():
    model, x = make("resnet"), images(3, seed=4)
    targets = trueup.calibrate(model, [images(20)], decide=False)
    x[1, 0, 3, 3] = torch.nan
    shift = trueup.measure(model, targets, x)
    assert shift.image_rank[1] == 1
    assert (shift.norm_rank[1] == 1).all()
    assert shift.evidence[[0, 2]].isfinite().all()


def test_an_image_is_measured_alike_in_any_batch():
    model, x = make("resnet"), images(6, seed=4)
    targets = trueup.calibrate(model, [images(20)], decide=False)
    together = trueup.measure(model, targets, x)
    for k in range(6):
        alone = trueup.measure(model, targets, x[k : k + 1])
        torch.testing.assert_close(alone.distance[0], together.distance[k], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(alone.evidence[0], together.evidence[k], atol=1e-6, rtol=1e-3)


def test_it_prints_as_a_table():
    model = make("vgg")
    text = str(trueup.measure(model, trueup.calibrate(model, [images(8)], decide=False), images(3)))
    assert text.splitlines()[0].startswith("activation  distance     rank   (means over 3 images)")
    assert len(text.splitlines()) == 5
    model = make("resnet")
    lines = str(trueup.measure(model, trueup.calibrate(model, [images(8)], decide=False), images(3))).splitlines()
    assert len(lines) == 1 + 7 + 1 + 6
    assert lines[8].split() == ["norm", "evidence", "rank"]


def test_values_print_what_they_hold_in_one_line():
    model = make("mobilenet")
    targets = trueup.calibrate(model, [images(8)], decide=False)
    (site, activation), (name, norm) = (next(iter(part.items())) for part in (targets.activations, targets.norms))
    shift = trueup.measure(model, targets, images(1), select=lambda one: one.name in (site, name))
    assert repr(shift) == "Shift(1 image, 1 activation, 1 norm)"
    assert repr(activation) == "ActivationTarget(shape=(8, 16, 16), 8 images, 8 sampled)"
    assert repr(norm) == "NormTarget(shape=(8, 16, 16), 8 images, 8 sampled)"
    assert repr(targets.fingerprint) == f"Fingerprint({len(targets.fingerprint.tensors)} tensors)"


def test_a_meter_measures_as_measure_does_and_traces_the_model_once(monkeypatch):
    model = make("resnet")
    targets = trueup.calibrate(model, [images(20)], decide=False)
    calls = traced(monkeypatch)
    meter = Meter(model, targets, select=lambda site: site.kind == "norm")
    for seed in range(3):
        x = images(4, seed=seed)
        shift = meter(x)
        wanted = trueup.measure(model, targets, x, select=lambda site: site.kind == "norm")
        assert shift.norms == wanted.norms
        assert shift.activations == ()
        assert shift.evidence.equal(wanted.evidence)
        assert shift.norm_rank.equal(wanted.norm_rank)
        assert shift.image_rank.equal(wanted.image_rank)
    assert len(calls) == 1 + 3  # the meter's, and one per call of measure


def test_a_meter_leaves_nothing_behind():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    meter, x = Meter(model, trueup.calibrate(model, [images(8, 8)], decide=False)), images(2, 8)

    def alive_after(calls):
        for _ in range(calls):
            meter(x)
        gc.collect()
        return len(gc.get_objects())

    alive_after(5)
    before = alive_after(1)
    assert alive_after(200) - before < 20
