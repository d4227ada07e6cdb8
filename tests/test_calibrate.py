"""Targets: right, and mergeable however the data are cut."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trueup
from architectures import images, make
from trueup import functional as F
from trueup.targets import Accumulator

RULE = trueup.Evidence(strength=0.05)


def first_site(model, x):
    """The output of the first activation of `vgg`, by hand."""
    return model[:2](x).detach()


def test_the_target_is_the_barycenter_and_the_spread_is_its_deviation():
    model, x = make("vgg"), images(30)
    targets = trueup.calibrate(model, [x], resolution=None, decide=False)
    a = first_site(model, x)
    torch.testing.assert_close(targets.activations["1"].target.float(), F.barycenter(a))
    torch.testing.assert_close(targets.activations["1"].spread.float(), F.spread(a), atol=1e-5, rtol=1e-4)
    assert targets.activations["1"].shape == (8, 32, 32)
    assert targets.images == 30
    assert targets.activations["1"].compression_error == 0


def test_the_stored_resolution_keeps_the_target_within_the_error_it_states():
    model, x = make("vgg"), images(30)
    full = trueup.calibrate(model, [x], resolution=None, decide=False).activations["1"]
    stated = []
    for resolution in (65, 257, 1025):
        stored = trueup.calibrate(model, [x], resolution=resolution, method="sort", decide=False).activations["1"]
        assert stored.target.shape == (resolution,)
        error = F.wasserstein(full.target[None], stored.order_statistics(8192)).item()
        assert 0 < error <= stored.compression_error
        stated.append(stored.compression_error / full.target.mean().item())
    assert stated[0] > 2 * stated[1] > 4 * stated[2]
    assert stated[2] < 1e-3


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 23), max_size=5, unique=True), shards=st.booleans(), keep=st.sampled_from([4, 512]))
def test_merging_does_not_depend_on_the_split(cuts, shards, keep):
    model, x = make("vgg"), images(24)
    parts = list(x.tensor_split(sorted(cuts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trueup.Targets, "SAMPLE", keep)
        whole = trueup.calibrate(model, [x], method="sort", decide=False)
        if shards:
            merged = trueup.calibrate(model, parts[:1], method="sort", decide=False)
            for part in reversed(parts[1:]):
                merged = trueup.calibrate(model, [part], method="sort", decide=False) + merged
        else:
            merged = trueup.calibrate(model, parts, method="sort", decide=False)
    assert merged.images == whole.images == 24
    assert merged.sampled.equal(whole.sampled)
    for name, site in whole.activations.items():
        # Convolutions of another batch size may round differently; the sums themselves are in float64.
        torch.testing.assert_close(merged.activations[name].target, site.target, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(merged.activations[name].spread, site.spread, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(merged.activations[name].sample, site.sample, atol=1e-5, rtol=1e-5)
        assert merged.activations[name].compression_error == pytest.approx(site.compression_error, rel=1e-4)


@settings(max_examples=10, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 23), max_size=5, unique=True),
    shards=st.booleans(),
    keep=st.sampled_from([(5, 9), (8, 512), (512, 4096)]),
)
def test_merging_channels_does_not_depend_on_the_split(cuts, shards, keep):
    model, x = make("mobilenet").double(), images(24).double()
    parts = list(x.tensor_split(sorted(cuts)))
    with pytest.MonkeyPatch.context() as patch:
        for name, count in zip(("SAMPLE", "GATE_SAMPLE"), keep, strict=True):
            patch.setattr(trueup.Targets, name, count)
        whole = trueup.calibrate(model, [x], decide=False)
        merged = trueup.calibrate(model, parts[:1] if shards else parts, decide=False)
        for part in reversed(parts[1:]) if shards else ():
            merged = trueup.calibrate(model, [part], decide=False) + merged
    assert merged.sampled.equal(whole.sampled)
    assert len(whole.sampled) == min(24, keep[1])
    assert list(merged.gate) == list(whole.gate) == ["blocks.0.conv.0.1", "blocks.0.conv.1.1"]
    for name, site in whole.gate.items():
        torch.testing.assert_close(merged.gate[name].total, site.total, atol=1e-12, rtol=1e-12)
        assert merged.gate[name].sample.equal(site.sample)
        assert len(site.sample) == min(24, keep[1])
    for one, other in zip(merged.fitted_gate, whole.fitted_gate, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    for name, site in whole.norms.items():
        assert len(site.sample) == min(24, keep[0])
        torch.testing.assert_close(merged.norms[name].total, site.total, atol=1e-12, rtol=1e-12)
        assert merged.norms[name].sample.equal(site.sample)
        torch.testing.assert_close(merged.norms[name].reference(RULE), site.reference(RULE), rtol=1e-9, atol=1e-12)


def _late_norms(site):
    return site.name.startswith("blocks.1") and site.kind == "norm"


@pytest.mark.filterwarnings("ignore:calibrate. all .* images are the same")
@settings(max_examples=15, deadline=None)
@given(data=st.data(), select=st.sampled_from([None, _late_norms, lambda site: site.kind == "activation"]))
def test_any_batches_and_shards_of_any_images_give_the_same_targets(data, select):
    """Images of two sizes, some of them the same, in an order, in batches and in shards."""
    pool = [*images(6).double(), *images(3, 14, seed=1).double()]  # maps of the latter have no bands
    drawn = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=14))
    shards = data.draw(st.lists(st.integers(0, len(drawn)), max_size=2).map(sorted))
    model = make("mobilenet").double()

    def batches(numbers):
        """Runs of images of one size, cut anywhere, some of them empty."""
        while numbers:
            size = pool[numbers[0]].shape
            run = next((k for k, n in enumerate(numbers) if pool[n].shape != size), len(numbers))
            if data.draw(st.booleans()):
                yield torch.zeros(0, *size).double()
            count = data.draw(st.integers(1, run))
            yield torch.stack([pool[n] for n in numbers[:count]])
            numbers = numbers[count:]

    with pytest.MonkeyPatch.context() as patch:
        for name, count in (("SAMPLE", 3), ("GATE_SAMPLE", 5)):
            patch.setattr(trueup.Targets, name, count)
        wanted = functools.reduce(
            operator.add, (trueup.calibrate(model, [pool[n][None]], select=select, decide=False) for n in sorted(drawn))
        )
        ends = [0, *shards, len(drawn)]
        parts = [drawn[a:b] for a, b in itertools.pairwise(ends) if a < b]
        found = functools.reduce(
            operator.add, (trueup.calibrate(model, batches(p), select=select, decide=False) for p in parts)
        )
    assert found.images == len(drawn)
    assert found.sampled.equal(wanted.sampled)
    assert len(found.sampled) == min(len(drawn), 5 if found.gate else 3)
    for group, most in (("activations", 3), ("norms", 3), ("gate", 5)):
        mine, theirs = getattr(found, group), getattr(wanted, group)
        assert list(mine) == list(theirs)
        for name, site in theirs.items():
            assert mine[name].images == len(drawn)
            torch.testing.assert_close(mine[name].total, site.total, atol=1e-9, rtol=1e-9)
            # A float16 may round the other way.
            torch.testing.assert_close(mine[name].sample, site.sample, atol=1e-6, rtol=2e-3)
            assert len(site.sample) == min(len(drawn), most)


@pytest.mark.parametrize("method", ["sort", "auto"])
def test_batches_of_several_sizes_add_up(method):
    model = make("resnet")
    batches = [images(5), images(3, 24), images(6), images(2, 12)]  # rows of the last are short, and so are sorted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trueup.Targets, "SAMPLE", 7)
        together = trueup.calibrate(model, batches, method=method, decide=False)
        apart = functools.reduce(
            operator.add, (trueup.calibrate(model, [b], method=method, decide=False) for b in batches)
        )
    assert together.sampled.equal(apart.sampled)
    for name, site in apart.activations.items():
        torch.testing.assert_close(together.activations[name].total, site.total)
        torch.testing.assert_close(together.activations[name].sample, site.sample)
        assert together.activations[name].loss == pytest.approx(site.loss)
    for name, site in apart.norms.items():
        torch.testing.assert_close(together.norms[name].total, site.total)
        assert together.norms[name].sample.equal(site.sample)


def test_the_sample_is_of_the_images_whose_content_hashes_lowest_and_their_own_quantiles():
    model, x = make("vgg"), images(10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trueup.Targets, "SAMPLE", 3)
        kept = trueup.calibrate(model, x.split(4), method="sort", decide=False)
        alone = {int(trueup.calibrate(model, [image[None]], decide=False).sampled): image for image in x}
    assert kept.sampled.tolist() == sorted(alone)[:3]
    for key, row in zip(kept.sampled.tolist(), kept.activations["1"].sample, strict=True):
        ordered = np.sort(first_site(model, alone[key][None]).flatten())
        wanted = np.interp(F.levels(kept.activations["1"].sample.shape[1]), np.linspace(0, 1, ordered.size), ordered)
        np.testing.assert_allclose(row, wanted, atol=1e-5)


def first_norm(model, x):
    """The output of the first norm of `mobilenet`, by hand."""
    return model.stem[:2](x).detach()


def test_channel_statistics_are_sums_over_all_images_and_those_of_single_ones():
    model, x = make("mobilenet"), images(30)
    targets = trueup.calibrate(model, x.split(7), decide=False)
    site = targets.norms["stem.1"]
    a = first_norm(model, x).double().numpy()
    assert site.shape == (8, 16, 16)
    assert site.images == targets.images == 30
    np.testing.assert_allclose(site.total[0], a.mean((2, 3)).sum(0), atol=1e-4)
    np.testing.assert_allclose(site.total[1], a.var((2, 3)).sum(0), atol=1e-4)
    one = {int(trueup.calibrate(model, [image[None]], decide=False).sampled): k for k, image in enumerate(x)}
    order = [one[int(key)] for key in targets.sampled]
    np.testing.assert_allclose(site.sample[:, 1], a.std((2, 3))[order], rtol=2e-3)
    assert site.sample.dtype == torch.float16


@pytest.mark.parametrize(("size", "bands"), [(16, True), (15, True), (14, False)])  # maps of 8, 8 and 7
def test_small_maps_have_no_bands(size, bands):
    model = make("mobilenet")
    site = trueup.calibrate(model, [images(12, size)], decide=False).norms["stem.1"]
    assert site.bands is bands
    assert site.reference(RULE).shape == (5, 3 if bands else 2, 8)
    assert site.reference(replace(RULE, bands=False)).shape == (5, 2, 8)
    # Maps of other sizes are taken as those of calibration were.
    robust = trueup.correct(model, trueup.calibrate(model, [images(12, size)], decide=False), trueup.Evidence())
    assert robust(images(2, 14)).shape == robust(images(2, 40)).shape == (2, 10)


def test_images_of_two_sizes_have_the_statistics_that_both_have():
    model = make("mobilenet")
    large, small = (
        trueup.calibrate(model, [images(6, 32)], decide=False),
        trueup.calibrate(model, [images(6, 14)], decide=False),
    )
    for merged in (large + small, small + large, trueup.calibrate(model, [images(6, 32), images(6, 14)], decide=False)):
        assert not merged.norms["stem.1"].bands
        assert merged.norms["stem.1"].images == 12


def test_the_strength_is_what_clean_images_lose_if_all_are_open():
    model, x = make("mobilenet"), images(200)
    targets = trueup.calibrate(model, x.split(50), decide=False)
    for strength in (0.01, 0.1):
        usual = targets.norms["stem.1"].reference(replace(RULE, strength=strength, base=0, counts=(1, 1, 1)))
        moments = trueup.functional.evidence.moments(first_norm(model, x), bands=True)[:, [0, 2, 3]].double()
        before = trueup.functional.evidence.statistics(moments, usual[3])
        lost = trueup.functional.evidence.shifts(before, usual).square().mean(0) / before.var(0, correction=0)
        torch.testing.assert_close(lost, torch.full_like(lost, strength), rtol=0.05, atol=1e-3)


def test_the_gate_reads_the_last_two_maps_among_the_first_third_of_all_norms():
    def gate(name, size=32, **options):
        return {site: len(target.total) for site, target in read(make(name), size, **options).items()}

    def read(model, size=32, **options):
        return trueup.calibrate(model, [images(12, size)], **options, decide=False).gate

    assert gate("mobilenet") == {"blocks.0.conv.0.1": 5, "blocks.0.conv.1.1": 5}  # of 7: the last two of three
    assert gate("densenet") == {"norms.0": 5}  # one of three
    assert gate("vit") == {"blocks.0.norm1": 2, "blocks.0.norm2": 2}  # tokens have no bands
    assert gate("mobilenet", 14) == {"blocks.0.conv.0.1": 2, "blocks.0.conv.1.1": 2}  # nor have maps of 7
    assert gate("vgg") == {}
    late = lambda site: site.name == "blocks.1.conv.3"  # noqa: E731
    assert gate("mobilenet", select=late) == gate("mobilenet")  # whether or not it is selected
    assert gate("mobilenet", select=lambda site: site.kind == "activation") == {}
    shrinking = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.MaxPool2d(4)),
        *(nn.BatchNorm2d(4) for _ in range(6)),
    ).eval()
    assert list(read(shrinking)) == ["1", "3"]  # the third of eight norms has maps of 4


def test_images_of_two_sizes_have_the_gate_that_both_have():
    model = make("mobilenet")
    large, small = (trueup.calibrate(model, [images(6, size)], decide=False) for size in (32, 14))
    for merged in (large + small, small + large, trueup.calibrate(model, [images(6, 32), images(6, 14)], decide=False)):
        assert [len(target.total) for target in merged.gate.values()] == [2, 2]
        assert merged.gate["blocks.0.conv.0.1"].images == 12
        assert trueup.correct(model, merged, trueup.Evidence())(images(3)).shape == (3, 10)


@pytest.mark.parametrize("count", [1, 2, 10])
def test_a_few_images_make_a_gate_that_is_as_honest_as_it_can_be(count):
    model = make("mobilenet")
    targets = trueup.calibrate(model, [images(count)], decide=False)
    shift = trueup.measure(model, targets, images(4, seed=5) * 9)
    assert (shift.image_rank <= 1 - 1 / (count // 2 + 1)).all()
    out = trueup.correct(model, targets, trueup.Evidence(budget=0.02, least=0))(images(4, seed=5) * 9)
    assert out.isfinite().all()
    assert out.equal(model(images(4, seed=5) * 9)) == (count < 10)  # p is 1/6 at least: under 0.4


@pytest.mark.filterwarnings("ignore:calibrate. all .* images are the same")
def test_images_seen_twice_are_not_held_out_from_a_gate_fitted_to_them():
    model, fresh = make("mobilenet"), images(100, seed=7)
    once, twice = (trueup.calibrate(model, [images(100)] * times, decide=False) for times in (1, 2))
    for targets in (once, twice, once + once):
        rank = trueup.measure(model, targets, fresh).image_rank
        assert (rank > 0.9).float().mean() < 0.2  # of clean images that were not seen
    assert len(once.fitted_gate.held) == 50
    assert len(twice.fitted_gate.held) == 100
    same = trueup.calibrate(model, [images(1)] * 9, decide=False)  # nothing to tell images apart by
    assert (trueup.measure(model, same, fresh).image_rank == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calibrating_under_autocast_and_adding_up_is_calibrating_in_half(dtype):
    """Statistics of single images in float16 cannot be concatenated under autocast to bfloat16."""
    model, x = make("mobilenet"), images(24)
    wanted = trueup.calibrate(model, [x], decide=False)
    with torch.autocast("cpu", dtype):
        found = trueup.calibrate(model, x[:16].split(8), decide=False) + trueup.calibrate(model, [x[16:]], decide=False)
    assert found.sampled.equal(wanted.sampled)
    for name, site in wanted.norms.items():
        assert found.norms[name].sample.dtype == torch.float16
        torch.testing.assert_close(found.norms[name].total, site.total, rtol=0.05, atol=0.5)


def test_memory_does_not_depend_on_the_number_of_images():
    model = make("vgg")

    def numbers(targets):
        return sum(t.numel() for site in targets.activations.values() for t in (site.total, site.square, site.sample))

    few = trueup.calibrate(model, [images(8)] * 70, decide=False)
    many = trueup.calibrate(model, [images(8)] * 140, decide=False)
    assert many.images == 2 * few.images == 1120
    assert numbers(many) == numbers(few)


def test_every_order_statistic_is_kept_without_those_of_every_image_at_every_site(monkeypatch):
    """At full resolution, the memory that a batch leaves at a site until it is added does not grow with the batch."""
    left, add = {}, Accumulator.add

    def watched(self, measured, names):
        left.update(measured)
        add(self, measured, names)

    monkeypatch.setattr(Accumulator, "add", watched)
    for name, site in trueup.calibrate(make("vgg"), [images(32)], resolution=None, decide=False).activations.items():
        assert left[name].values.numel() == 2 * len(site.total)


def test_one_batch_is_held_at_a_time():
    alive, most = weakref.WeakSet(), 0

    def loader():
        nonlocal most
        for _ in range(6):
            batch = images(4)
            alive.add(batch)
            if len(alive) > 2:
                gc.collect()  # seconds in a long session, so only if it could matter
            most = max(most, len(alive))
            yield batch

    trueup.calibrate(make("vgg"), loader(), decide=False)
    assert most <= 2  # the new one, and the one before that the loop still names


def test_the_rank_is_the_share_of_clean_images_that_lie_closer():
    model, x = make("vgg"), images(200)
    targets = trueup.calibrate(model, [x], method="sort", decide=False)
    ordered = F.as_rows(first_site(model, x)).sort(dim=1).values
    distances = F.wasserstein(ordered, targets.activations["1"].order_statistics(8192).float())
    ranks = distances.argsort().argsort() / 201
    rank = trueup.measure(model, targets, x).activation_rank[:, 0]
    assert (rank - ranks).abs().max() < 0.05  # the sketch's distance stands in for the exact one
    assert rank.min() == 0


def test_targets_of_norms_alone_serve_evidence_only():
    model = make("mobilenet")
    targets = trueup.calibrate(model, [images(8)], select=lambda site: site.kind == "norm", decide=False)
    assert targets.images == 8
    assert repr(targets) == "Targets(0 activations, 7 norms, 8 images)"
    assert trueup.correct(model, targets, trueup.Evidence())(images(2)).shape == (2, 10)
    with pytest.raises(ValueError, match="Correction needs targets of activation sites"):
        trueup.correct(model, targets, trueup.Correction())


def test_a_model_without_norms_has_nothing_for_evidence():
    model = make("vgg")
    with pytest.raises(ValueError, match="Evidence needs targets of norm sites.*Sequential has no such site"):
        trueup.correct(model, trueup.calibrate(model, [images(2)], decide=False), trueup.Evidence())


def test_targets_that_do_not_belong_together_cannot_be_added():
    model, x = make("vgg"), images(4)
    targets = trueup.calibrate(model, [x], decide=False)
    with pytest.raises(ValueError, match="two different models.*'0.weight'"):
        targets + trueup.calibrate(make("resnet"), [x], decide=False)
    with pytest.raises(ValueError, match="cannot be added: only one has a target of the site .1."):
        targets + trueup.calibrate(model, [x], select=lambda site: site.name != "1", decide=False)
    with pytest.raises(ValueError, match=r"'1': calibrated at two resolutions \(1025 and 33 values\)"):
        targets + trueup.calibrate(model, [x], resolution=33, decide=False)
    with pytest.raises(TypeError):
        targets + 1


@pytest.mark.parametrize("size", [(1024, 1024), (512, 512), (64, 1024)])
def test_large_images_that_differ_in_some_columns_are_different_images(size):
    """Letterboxed pictures, documents and masks: a strip somewhere is all that tells them apart."""
    x = torch.zeros(8, 3, *size)
    for k in range(8):
        x[k, :, 20:60, 37 + 40 * k : 67 + 40 * k] = 1
    targets = trueup.calibrate(nn.Sequential(nn.AvgPool2d(32), nn.BatchNorm2d(3)).eval(), [x], decide=False)
    assert len(targets.sampled.unique()) == 8


@pytest.mark.parametrize("picture", [torch.zeros(3, 32, 32), images(1)[0]], ids=["black", "any"])
def test_images_that_are_all_the_same_are_warned_of_also_without_a_decision(picture):
    with pytest.warns(UserWarning, match="all 12 images are the same, so every other image will look unusual"):
        trueup.calibrate(make("vgg"), [picture.expand(6, -1, -1, -1).contiguous()] * 2, decide=False)
