"""The default: calibration chooses a setting that is safe for the model, or leaves it alone and says so."""

from __future__ import annotations

import warnings
from dataclasses import replace
from hashlib import blake2b

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup import Evidence
from trueup._answers import relative_changes
from trueup.decide import ImageSample, search
from trueup.decide.perturb import PERTURBATIONS, Scale, perturb
from trueup.functional.evidence import realign
from trueup.targets import Decision, Trial
from trueup.targets.decision import LEFT_ALONE

CLASSES = 4


def pictures(n: int, seed: int, *, contrast: float = 1.0, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Gratings of four directions, the classes, with random phase and brightness."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    angle = labels * torch.pi / CLASSES
    phase = 6 * torch.rand(n, generator=draw)
    wave = torch.sin(1.2 * (x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]) + phase[:, None, None])
    images = contrast * wave[:, None] * (0.5 + torch.rand(n, 1, 1, 1, generator=draw))
    return images + noise * torch.randn(n, 1, 16, 16, generator=draw), labels


class Small(nn.Module):
    """Three convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


class Overflowing(nn.Module):
    """Has a norm that overflows for noisy images."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.norm = body, nn.BatchNorm2d(1)

    def forward(self, x: Tensor) -> Tensor:
        rough = (x[..., 1:] - x[..., :-1]).square().mean(dim=(1, 2, 3), keepdim=True) > 1.5
        return self.body(x) + 0 * torch.nan_to_num(self.norm(x * torch.where(rough, 1e38, 1.0)).mean(dim=(2, 3)))


class Loudest(nn.Module):
    """Answers which channel is loudest, after many norms: a fixed rule takes a channel that stands out for a fault."""

    def __init__(self, channels: int = 60, depth: int = 40) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(nn.BatchNorm2d(channels, momentum=None) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norms(x).mean(dim=(2, 3))


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = Small()
    images, labels = pictures(512, 1)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for epoch in range(12):
        for some in torch.randperm(512, generator=torch.Generator().manual_seed(epoch)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(images[some]), labels[some]).backward()
            optimiser.step()
    return model.eval()


@pytest.fixture(scope="module")
def decided(trained):
    return trueup.calibrate(trained, pictures(120, 2)[0].split(40))


@pytest.fixture(scope="module")
def loudest():
    """The model, clean images and their labels."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(60, (300,), generator=draw)
    loudness = F.one_hot(labels, 60) + 0.3 * torch.randn(300, 60, generator=draw)
    images = loudness[:, :, None, None] + 0.3 * torch.randn(300, 60, 4, 4, generator=draw)
    model = Loudest().train()
    with torch.no_grad():
        model(images)
    return model.eval(), images, labels


def accuracy(model, images, labels):
    with torch.inference_mode():
        return float((model(images).argmax(1) == labels).double().mean())


def test_the_default_gains_under_shifts_that_were_never_shown_and_keeps_clean_answers(trained, decided):
    assert decided.rule.changes
    robust = trueup.correct(trained, decided)
    clean, labels = pictures(400, 4)
    assert accuracy(robust, clean, labels) >= accuracy(trained, clean, labels) - 0.02
    faint, labels = pictures(400, 5, contrast=0.3)
    assert accuracy(robust, faint + 1.5, labels) > accuracy(trained, faint + 1.5, labels) + 0.2


def test_a_harmful_default_does_not_come_back(loudest):
    model, images, labels = loudest
    targets = trueup.calibrate(model, images[:150].split(50))
    fixed = trueup.correct(model, targets, Evidence())
    before = accuracy(model, images[150:], labels[150:])
    assert accuracy(fixed, images[150:], labels[150:]) < before - 0.05, "a fixed rule should harm this model"
    assert accuracy(trueup.correct(model, targets), images[150:], labels[150:]) >= before - 0.02


def test_no_more_clean_answers_change_than_allowed(trained, decided):
    images = pictures(120, 2)[0].split(40)
    with pytest.warns(UserWarning, match="120 different images cannot show that at most 0.10% .*give 999"):
        strict = trueup.calibrate(trained, images, max_changed=0.001)
    assert torch.equal(trueup.correct(trained, strict)(images[0]), trained(images[0]))
    assert decided.decision.chosen.share_changed <= 0.05


def test_the_report_says_what_was_chosen_and_why(decided):
    text = str(decided)
    for part in (repr(decided.rule), "clean answers that change", "allowed: 5.0%", "under strong perturbation", "gain"):
        assert part in text


def test_without_a_decision_the_rule_is_a_careful_one_and_says_so(trained):
    targets = trueup.calibrate(trained, pictures(32, 2)[0].split(16), decide=False)
    assert targets.rule is None
    with pytest.warns(UserWarning, match="carry no decision"):
        robust = trueup.correct(trained, targets)
    assert robust.rule.depth < 0.2


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (lambda: pictures(2, 2)[0], "2 different images are too few"),
        (lambda: pictures(10, 2)[0], "10 different images are too few"),
        (lambda: pictures(10, 2)[0].repeat(20, 1, 1, 1), "10 different images are too few"),
        (lambda: torch.zeros(100, 1, 16, 16), "1 different images are too few"),
    ],
    ids=["two images", "ten images", "ten images repeated", "all black"],
)
def test_a_hopeless_calibration_warns_and_leaves_the_model_alone(trained, images, reason):
    with pytest.warns(UserWarning, match=reason):
        targets = trueup.calibrate(trained, images().split(50))
    x = pictures(8, 9)[0]
    assert torch.equal(trueup.correct(trained, targets)(x), trained(x))


def test_the_decision_does_not_depend_on_batches_or_order(trained, decided):
    images = pictures(120, 2)[0]
    again = trueup.calibrate(trained, images[torch.randperm(120)].split(120))
    assert [t.rule for t in again.decision.trials] == [t.rule for t in decided.decision.trials]
    for one, other in zip(again.decision.trials, decided.decision.trials, strict=True):
        assert abs(one.changed - other.changed) <= 1
        assert one.gain == pytest.approx(other.gain, abs=1.0)


def test_the_decision_is_saved_and_loaded(decided, tmp_path):
    decided.save(tmp_path / "t.safetensors")
    loaded = trueup.Targets.load(tmp_path / "t.safetensors")
    assert loaded == decided
    assert loaded.decision == decided.decision


def test_adding_targets_pools_their_trials(trained, decided):
    other = trueup.calibrate(trained, pictures(120, 6)[0].split(60))
    both = decided + other
    parts = [{trial.rule: trial for trial in part.decision.trials} for part in (decided, other)]
    assert len(both.decision.trials) > 2, "some settings should be within the limits of both"
    for pooled in both.decision.trials:
        mine, theirs = (part[pooled.rule] for part in parts)
        assert pooled.images == mine.images + theirs.images == 120, "half of the images of each"
        assert pooled.gain == mine.gain + theirs.gain
    drift = next(iter(both.norms.values()))
    assert drift.drifted == 2 * next(iter(decided.norms.values())).drifted
    first, second = (next(iter(part.norms.values())).weights for part in (decided, other))
    torch.testing.assert_close(drift.weights, (first * second).sqrt())


def test_a_sum_counts_every_setting_that_was_tried():
    """Those that only one part refused are not among the pooled trials either."""
    trials = [Trial(LEFT_ALONE, 10, 0.0, (6.0, 4.0), 0.0, 0.0)]
    trials += [Trial(Evidence(strength=s), 10, 0.0, (6.0, 4.0), 0.0, 0.0) for s in (0.1, 0.2, 0.3)]
    both = Decision((*trials[:2], trials[2]), refused=1) + Decision((*trials[:2], trials[3]), refused=1)
    assert len(both.trials) == 2
    assert "none of 3 settings" in str(both)


def test_what_two_parts_decide_together_changes_no_more_than_the_stricter_allows(decided):
    trials = decided.decision.trials
    strict, lax = Decision(trials, max_changed=0.01), Decision(trials, max_changed=0.2)
    assert (strict + lax).max_changed == (lax + strict).max_changed == 0.01


def test_if_no_answer_can_change_all_are_kept_at_every_level(trained):
    """Each image counts once, however many perturbed copies it has."""
    with pytest.warns(UserWarning, match="left as it is"):
        same = trueup.calibrate(
            trained, pictures(60, 2)[0].split(30), answer=lambda out: torch.zeros(len(out), dtype=torch.int64)
        )
    for trial in same.decision.trials:
        assert trial.changed == 0
        assert trial.kept == pytest.approx((60, 60))
        assert trial.gain == pytest.approx(0)


class Brightness(nn.Module):
    """Answers whether an image is bright: so easy that mild perturbations never fool it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.norm(x).mean(dim=(1, 2, 3))
        return torch.stack([mean, -mean], dim=1)


def test_an_easy_task_is_perturbed_until_some_answers_change(monkeypatch):
    """Otherwise all settings would keep all answers, and nothing could be chosen."""
    sign = torch.where(torch.arange(100) % 2 == 0, 1.0, -1.0)[:, None, None, None]
    images = 2 * sign + 0.5 * torch.randn(100, 1, 16, 16, generator=torch.Generator().manual_seed(0))

    def lost_by_the_model() -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model may be left as it is
            own = trueup.calibrate(Brightness().eval(), images.split(50)).decision.trials[0]
        return 1 - own.kept[1] / own.images

    assert lost_by_the_model() > search.FOOLED / 2
    monkeypatch.setattr(search, "STRONG", search.STRONG[:1])
    assert lost_by_the_model() < search.FOOLED / 2


def trial(strength, *, changed=0.0, gain=1.0, moved=0.0):
    """A trial over 100 images."""
    rule = replace(search.CANDIDATES[0], strength=strength)
    return Trial(rule, 100, changed, (50.0, 40.0), gain, gain**2 / 100, moved)


def test_the_best_setting_within_the_budget_wins_and_must_gain():
    none = Trial(LEFT_ALONE, 100, 0.0, (50.0, 40.0), 0.0, 0.0)
    weak, strong = trial(0.01, changed=1, gain=2.0), trial(0.04, changed=3, gain=4.0)
    wild = trial(0.2, changed=20, gain=9.0)
    assert Decision((none, weak, strong, wild)).rule == strong.rule
    assert Decision((none, weak, strong, wild), max_changed=0.5).rule == wild.rule
    assert Decision((none, trial(0.04, gain=-0.5))).rule == LEFT_ALONE


def test_the_share_of_changed_answers_counts_the_next_image_as_changed():
    """So that its expectation over new images is bounded by the budget (conformal risk control)."""
    assert trial(0.04, changed=4).share_changed == 5 / 101
    assert Decision((trial(0.04, changed=4),), max_changed=0.05).chosen is not None
    assert Decision((trial(0.04, changed=5),), max_changed=0.05).chosen is None
    assert Trial(LEFT_ALONE, 100, 0.0, (50.0, 40.0), 0.0, 0.0).share_changed == 0


def test_for_a_gated_setting_only_images_that_its_gate_was_not_fitted_to_count_as_changed(trained, monkeypatch):
    """That is every other one: of 51 images, 25. The answer is one that the slightest movement changes."""
    rules = (Evidence(least=0.0, strength=0.5), Evidence(budget=1, strength=0.5))
    monkeypatch.setattr(search, "CANDIDATES", rules)
    monkeypatch.setattr("trueup.targets.decision.MAX_MOVED", 9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model is left as it is
        said = lambda out: (1e5 * out[:, 0]).round().long()  # noqa: E731
        found = trueup.calibrate(trained, [pictures(51, 2)[0]], answer=said, max_changed=1.0)
    _, gated, every = found.decision.trials
    assert gated.rule.gated
    assert 0 < gated.changed < 51
    assert gated.changed / 51 * 25 == pytest.approx(round(gated.changed / 51 * 25))
    assert gated.changed != pytest.approx(round(gated.changed))
    assert every.changed == round(every.changed)


def test_on_several_ranks_the_images_that_the_gate_of_all_ranks_was_not_fitted_to_count_as_changed(
    trained, monkeypatch
):
    """The gate is fitted to every other image of all ranks, by their hashes: here, of two."""
    rule = Evidence(least=0.0, strength=0.5)
    monkeypatch.setattr(search, "CANDIDATES", (rule,))
    mine, theirs = pictures(51, 2)[0], trueup.calibrate(trained, [pictures(45, 7)[0]], decide=False)
    ranks = lambda value: [value, theirs] if isinstance(value, trueup.Targets) else [value]  # noqa: E731
    monkeypatch.setattr("trueup._calibrate.gathered", ranks)
    said = lambda out: (1e5 * out[:, 0]).round().long()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model is left as it is
        targets = trueup.calibrate(trained, [mine], answer=said, max_changed=1.0)
    hashes = [int.from_bytes(blake2b(x.numpy().tobytes(), digest_size=8).digest(), "big", signed=True) for x in mine]
    order = sorted({*hashes, *theirs.sampled.tolist()})
    held_out = torch.tensor([order.index(value) % 2 == 1 for value in hashes])
    robust = trueup.correct(trained, targets, rule)
    with torch.inference_mode():
        changed = (said(robust(mine)) != said(trained(mine))).double()
    assert changed[held_out].mean() != changed[~held_out].mean()
    assert targets.decision.trials[1].changed == pytest.approx(51 * float(changed[held_out].mean()))


def test_a_setting_that_moves_clean_scores_far_is_out_even_if_no_answer_changes():
    """Training images keep their answers where unseen images would not."""
    none = Trial(LEFT_ALONE, 100, 0.0, (50.0, 40.0), 0.0, 0.0)
    near, far = trial(0.01, gain=1.0, moved=5.9), trial(0.2, gain=9.0, moved=6.1)
    assert Decision((none, near, far)).rule == near.rule
    assert Decision((none, far)).rule == LEFT_ALONE
    half = trial(0.2, gain=9.0, moved=0.0)
    assert Decision((none + none, far + half)).rule == far.rule, "pooled images count together"


def test_scores_that_are_nan_count_as_moved_and_outputs_that_do_not_match_as_unmoved():
    """A NaN in a sum could not be saved, and boxes may be more or fewer."""
    ones = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    assert relative_changes(ones, torch.tensor([[1.0, torch.nan], [1.0, -1.0]]), 2).tolist() == [[1.0, 0.0]]
    assert relative_changes([ones, ones], [torch.ones(3, 4)], 2).shape == (0, 2)


def test_classes_that_a_model_never_answers_do_not_count_as_moved():
    """Their scores are minus infinity, so that the mean over all classes would be, too."""
    before, after = torch.tensor([[1.0, -1.0]]), torch.tensor([[1.2, -1.2]])
    masked = [
        torch.cat([scores[:, :1], scores.new_tensor([[-torch.inf]]), scores[:, 1:]], 1) for scores in (before, after)
    ]
    assert torch.equal(relative_changes(*masked, 1), relative_changes(before, after, 1))
    assert relative_changes(masked[0], torch.tensor([[1.0, 0.0, -1.0]]), 1).tolist() == [[1.0]], "no longer masked"


def test_the_distance_that_clean_scores_move_is_the_mean_over_the_images(trained):
    """Against a second computation, image by image."""
    images = pictures(60, 2)[0]
    targets = trueup.calibrate(trained, images.split(30))
    found = targets.decision.trials[-1]
    robust = trueup.correct(trained, targets, found.rule)
    with torch.inference_mode():
        before, after = ((lambda y: y - y.mean(dim=1, keepdim=True))(model(images)) for model in (trained, robust))
    expected = ((after - before).norm(dim=1) / before.norm(dim=1)).mean()
    assert expected > 0
    assert found.mean_moved == pytest.approx(float(expected), rel=1e-3)


def test_no_candidate_multiplies_what_is_left_of_blurred_detail():
    """A blurred map's detail is mostly rounding and compression; the floor limits how far it is raised."""
    draw = torch.Generator().manual_seed(0)
    clean = torch.randn(400, 1, 16, 16, generator=draw) * torch.exp(0.1 * torch.randn(400, 1, 1, 1, generator=draw))
    targets = trueup.calibrate(
        nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.ReLU()).eval(), clean.split(100), decide=False
    )
    target = replace(targets.norms["0"], drift=torch.ones(4, 1, dtype=torch.float64), drifted=1)
    blurred = 1e-3 * clean[:8]
    for rule in search.CANDIDATES[:-1]:
        out = realign(blurred, target.reference(replace(rule, strength=0.9)))
        gain = (out.std(dim=(2, 3)) / blurred.std(dim=(2, 3))).max()
        assert 1 < gain < 4


class TestSharpEdges:
    """Each was found wrong once."""

    def test_kept_images_are_copies(self):
        batch = pictures(60, 2)[0]
        sample = ImageSample()
        sample.add(torch.arange(60), batch)
        before = [inputs.images.clone() for _, inputs in sample.batches()]
        batch.zero_()  # a loader may fill the same buffer again
        assert all(torch.equal(a, b.images) for a, (_, b) in zip(before, sample.batches(), strict=True))

    def test_a_sum_with_undecided_targets_keeps_the_decision_and_works(self, trained, decided):
        other = trueup.calibrate(trained, pictures(60, 7)[0].split(30), decide=False)
        for both in (decided + other, other + decided):
            assert both.rule == decided.rule
            trueup.correct(trained, both)

    @pytest.mark.parametrize("decide", [True, False])
    def test_a_sum_with_targets_of_smaller_images_corrects_the_model(self, trained, decided, decide):
        """Their maps have no bands, so weights that were learned for bands do not fit the sum."""
        smaller = trueup.calibrate(trained, F.interpolate(pictures(120, 3)[0], 14).split(40), decide=decide)
        assert any(a.bands != b.bands for a, b in zip(decided.norms.values(), smaller.norms.values(), strict=True))
        for both in (decided + smaller, smaller + decided):
            trueup.correct(trained, both)
            assert decide or not any(trial.rule.tuned for trial in both.decision.trials)

    def test_images_of_two_sizes_are_decided_on(self, trained):
        small, large = pictures(80, 2)[0][:, :, :10, :10], pictures(80, 3)[0]
        targets = trueup.calibrate(trained, [small, large])
        assert targets.decision.trials[0].images == 80, "the other half of the images tuned"
        trueup.correct(trained, targets)

    def test_drift_does_not_depend_on_the_batch_size(self, trained, decided):
        again = trueup.calibrate(trained, pictures(120, 2)[0].split(17))
        for name, target in decided.norms.items():
            assert again.norms[name].drifted == target.drifted
            torch.testing.assert_close(again.norms[name].drift, target.drift, rtol=1e-3, atol=1e-3)

    def test_targets_of_a_model_that_overflows_when_perturbed_can_be_saved(self, trained, tmp_path):
        targets = trueup.calibrate(Overflowing(trained).eval(), pictures(120, 2)[0].split(40))
        targets.save(tmp_path / "t")
        assert trueup.Targets.load(tmp_path / "t") == targets

    def test_a_module_made_in_inference_mode_can_be_trained_through(self, trained, decided):
        with torch.inference_mode():
            robust = trueup.correct(trained, decided)
        x = pictures(4, 1)[0].requires_grad_()
        robust(x).sum().backward()
        assert x.grad is not None

    def test_calibration_leaves_tensors_alone_that_are_no_buffers(self):
        class Counting(Small):
            def __init__(self) -> None:
                super().__init__()
                self.count = torch.zeros(())

            def forward(self, x: Tensor) -> Tensor:
                self.count += 1
                return super().forward(x)

        model = Counting().eval()
        trueup.calibrate(model, pictures(16, 1)[0].split(8), decide=False, leaves=())
        assert model.count == 0

    @pytest.mark.parametrize(
        ("answer", "message"),
        [(lambda out: out, "float32 of shape"), (lambda _: [1], "list"), (lambda out: out.argmax(), "int64 of shape")],
        ids=["scores", "a list", "one number"],
    )
    def test_an_answer_that_cannot_be_compared_is_refused(self, trained, answer, message):
        with pytest.raises(TypeError, match=f"answer= returned .*{message}"):
            trueup.calibrate(trained, pictures(60, 2)[0].split(30), answer=answer)

    @pytest.mark.parametrize("value", ["0.1", True, 0, 1.5])
    def test_a_budget_that_is_no_share_is_refused(self, trained, value):
        with pytest.raises(ValueError, match="max_changed=.*expected a share"):
            trueup.calibrate(trained, pictures(60, 2)[0].split(30), max_changed=value)


class TestPerturbations:
    """They take any input, are deterministic, and stay in the range of clean images."""

    @pytest.mark.parametrize("name", PERTURBATIONS)
    @pytest.mark.parametrize("shape", [(1, 16, 16), (3, 17, 40), (5, 9, 9)], ids=["one channel", "odd", "five bands"])
    def test_any_input(self, name, shape):
        clean = 3 + 10 * torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
        scale = Scale.of_batches(lambda: [clean])
        out = perturb(clean, name, scale, numbers=torch.arange(6), level=1.5)
        assert out.shape == clean.shape
        assert out.isfinite().all()
        assert (out >= scale.low).all()
        assert (out <= scale.high).all()
        assert (out - clean).abs().mean() > 0.01 * clean.std()
        alone = perturb(clean[4:5], name, scale, numbers=torch.tensor([4]), level=1.5)
        assert torch.allclose(alone[0], out[4], atol=1e-4)

    @pytest.mark.parametrize("name", PERTURBATIONS)
    def test_a_higher_level_changes_more(self, name):
        clean = pictures(16, 0)[0]
        scale, numbers = Scale.of_batches(lambda: [clean]), torch.arange(16)
        mild, strong = (
            (perturb(clean, name, scale, numbers=numbers, level=level) - clean).abs().mean() for level in (0.5, 1.5)
        )
        assert strong > 1.3 * mild

    def test_smoothing_leaves_almost_no_fine_detail(self):
        """A lens does not either; settings that amplify what is left must not look good here."""
        noise = torch.rand(4, 1, 224, 224, generator=torch.Generator().manual_seed(0))
        out = perturb(noise, "smooth", Scale.of_batches(lambda: [noise]), numbers=torch.arange(4), level=1.5)
        before, after = (torch.fft.rfft2(images)[..., 56:168, 56:].abs().square().mean() for images in (noise, out))
        assert after < 0.01 * before

    def test_units_do_not_matter(self):
        clean = pictures(8, 0)[0]
        scaled = 50 * clean + 7
        for name in PERTURBATIONS:
            small = perturb(clean, name, Scale.of_batches(lambda: [clean]), numbers=torch.arange(8))
            large = perturb(scaled, name, Scale.of_batches(lambda: [scaled]), numbers=torch.arange(8))
            assert torch.allclose(50 * small + 7, large, atol=0.05), name
