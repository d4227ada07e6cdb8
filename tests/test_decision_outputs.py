"""What the decision makes of calibration images that show little, and of outputs that are not plain scores."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from test_decision import pictures, trained  # noqa: F401  # a fixture
from trueup._answers import comparable, relative_changes
from trueup.decide import tune


class After(nn.Module):
    """A network with something behind its output."""

    def __init__(self, body: nn.Module, change) -> None:
        super().__init__()
        self.body, self.change = body, change

    def forward(self, x: Tensor):
        return self.change(self.body(x))


def flat(count: int) -> Tensor:
    return torch.linspace(-2, 2, count)[:, None, None, None].expand(count, 1, 16, 16).contiguous()


def moved(targets) -> list[float]:
    return [trial.mean_moved for trial in targets.decision.trials]


def test_images_of_one_colour_are_left_out(trained):  # noqa: F811
    """They differ from each other and lose nothing under blur: a setting that is ruinous seems to gain by them."""
    real = pictures(120, 2)[0]
    with pytest.warns(UserWarning, match="40 images are of one colour") as caught:
        mixed = trueup.calibrate(trained, torch.cat([real, flat(40)]).split(40))
    assert [warning.filename for warning in caught] == [__file__]
    assert mixed.decision.trials[0].images == 60, "half of the others"


@pytest.mark.parametrize("count", [100, 140])
def test_a_calibration_on_images_of_one_colour_leaves_the_model_alone(trained, count):  # noqa: F811
    images = torch.cat([flat(count), pictures(20, 2)[0]]) + 1e-6 * torch.randn(count + 20, 1, 16, 16)
    with (
        pytest.warns(UserWarning, match=f"{count} images are of one colour"),
        pytest.warns(UserWarning, match="20 different images are too few"),
    ):
        targets = trueup.calibrate(trained, images.split(40))
    assert not targets.rule.changes


def test_a_calibration_on_one_class_leaves_the_model_alone(trained):  # noqa: F811
    """A setting that answers this class always would keep all answers."""
    images, labels = pictures(600, 2)
    with pytest.warns(UserWarning, match="9.% of the images the same answer|100% of the images the same answer"):
        targets = trueup.calibrate(trained, images[labels == 1].split(50))
    assert not targets.rule.changes
    assert trueup.calibrate(trained, images[labels < 2].split(50)).decision.trials, "two classes can be judged"


def on_one_pixel(scores: Tensor) -> Tensor:
    """Scores per pixel `(images, 5, 8, 8)`: of an object that covers one pixel, and a sure background elsewhere."""
    maps = 9 * F.one_hot(torch.zeros(len(scores), 8, 8, dtype=torch.int64), 5).permute(0, 3, 1, 2).float()
    maps[:, :, 0, 0] = F.pad(scores, (1, 0), value=-9.0)
    return maps


def test_a_small_object_counts_as_much_as_a_picture_of_it(trained):  # noqa: F811
    """A setting that erases all objects, and so keeps nearly all pixels, would seem to be the best."""
    images = pictures(60, 2)[0].split(60)
    whole = trueup.calibrate(trained, images).decision
    small = trueup.calibrate(After(trained, on_one_pixel).eval(), images).decision
    ours, theirs = ({trial.rule: trial for trial in each.trials} for each in (small, whole))
    both = ours.keys() & theirs.keys()
    assert len(both) > 3
    for rule in both:
        assert ours[rule].changed == theirs[rule].changed
        assert ours[rule].kept == pytest.approx(theirs[rule].kept)


def test_a_calibration_on_images_without_an_object_leaves_the_model_alone(trained):  # noqa: F811
    empty = After(trained, lambda y: on_one_pixel(y - 99)).eval()
    with pytest.warns(UserWarning, match="100% of the images the same answer"):
        targets = trueup.calibrate(empty, pictures(60, 2)[0].split(60))
    assert not targets.rule.changes


def test_an_output_whose_first_scores_are_not_those_of_images_leaves_the_model_alone(trained):  # noqa: F811
    beside = After(trained, lambda y: {"prototypes": torch.ones(7, 5), "logits": y}).eval()
    with pytest.warns(UserWarning, match="have 7 rows for 60 images; say what its answer is with answer="):
        targets = trueup.calibrate(beside, pictures(60, 2)[0].split(60))
    assert not targets.rule.changes
    named = trueup.calibrate(beside, pictures(60, 2)[0].split(60), answer=lambda out: out["logits"].argmax(1))
    assert named.decision.trials


def test_probabilities_are_judged_as_the_scores_before_them(trained):  # noqa: F811
    images = pictures(120, 2)[0].split(60)
    scores = trueup.calibrate(trained, images)
    shares = trueup.calibrate(After(trained, lambda y: y.softmax(1)).eval(), images)
    assert [t.rule for t in shares.decision.trials] == [t.rule for t in scores.decision.trials]
    assert moved(shares) == pytest.approx(moved(scores), rel=0.02)
    for ours, theirs in zip(shares.norms.values(), scores.norms.values(), strict=True):
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=0.02, atol=1e-6)


def test_other_outputs_do_not_hide_how_far_scores_move(trained):  # noqa: F811
    images = pictures(120, 2)[0].split(60)
    scores = trueup.calibrate(trained, images)
    beside = After(trained, lambda y: {"logits": y, "features": 1e4 + torch.zeros(len(y), 8)}).eval()
    assert moved(trueup.calibrate(beside, images)) == pytest.approx(moved(scores))
    uneasy = After(trained, lambda y: {"logits": y, "difference": y[:, :1] - y[:, 1:2]}).eval()
    assert moved(trueup.calibrate(uneasy, images)) == pytest.approx(moved(scores))
    named = trueup.calibrate(beside, images, answer=lambda out: out["logits"].argmax(1))
    plain = trueup.calibrate(trained, images, answer=lambda out: out.argmax(1))
    ours, theirs = ({trial.rule: trial.mean_moved for trial in each.decision.trials} for each in (named, plain))
    both = [rule for rule in ours if rule in theirs and rule.changes]
    assert both
    assert [ours[rule] for rule in both] == pytest.approx([theirs[rule] for rule in both], rel=0.05)


@pytest.mark.parametrize(
    "mask",
    [
        lambda y: torch.cat([y, torch.full_like(y, -1e9)], dim=1),  # scores that are overwritten
        lambda y: torch.cat([y, y - 1e4], dim=1),  # scores to which a large negative number is added
    ],
    ids=["overwritten", "added"],
)
def test_masked_classes_do_not_hide_how_far_the_other_scores_move(trained, mask):  # noqa: F811
    """The size of their scores is that of the mask, beside which every change is small."""
    before = trained(pictures(20, 2)[0]).detach()
    after = before + 0.1 * torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
    plain = relative_changes(before, after, 20)
    torch.testing.assert_close(relative_changes(mask(before), mask(after), 20), plain)


def test_a_single_score_is_limited_and_learned_from_too(trained):  # noqa: F811
    single = After(trained, lambda y: y[:, :1] - y[:, 1:2]).eval()
    with pytest.warns(UserWarning, match="say what its answer is"):
        trueup.calibrate(single, pictures(60, 2)[0].split(60))
    targets = trueup.calibrate(single, pictures(120, 2)[0].split(60), answer=lambda y: y[:, 0] > 0)
    assert max(moved(targets)) > 0
    assert all(norm.weights is not None for norm in targets.norms.values())


def test_an_image_that_does_not_move_has_a_derivative():
    before = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    after = before.clone().requires_grad_()
    distance = relative_changes(before, after * torch.tensor([[1.0], [1.1]]), 2, answer=lambda y: y)
    (gradient,) = torch.autograd.grad(distance.sum(), after)
    assert gradient[0].tolist() == [0.0, 0.0]
    assert bool(gradient.isfinite().all())
    assert bool((gradient[1] != 0).any())


def test_a_score_per_pixel_is_that_of_the_second_of_two_classes():
    (found,) = comparable(torch.full((2, 1, 3, 3), 4.0), 2)
    assert found.shape == (2, 2, 3, 3)
    assert found.argmax(1).unique().tolist() == [1]


def test_a_model_that_takes_one_image_at_a_time_is_judged(trained):  # noqa: F811
    class OneByOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = trained

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.reshape(1, 1, 16, 16))

    alone = trueup.calibrate(OneByOne().eval(), pictures(60, 2)[0].split(1))
    together = trueup.calibrate(trained, pictures(60, 2)[0].split(20))
    for one, other in zip(alone.decision.trials, together.decision.trials, strict=True):
        assert (one.rule, one.images) == (other.rule, other.images)
        assert one.gain == pytest.approx(other.gain, abs=1.0)


def test_a_half_precision_model_learns_from_clean_images(trained, monkeypatch):  # noqa: F811
    """Their derivatives are so small that float16 would round them to zero: a network hardly changes such answers."""
    sizes, real = [], torch.autograd.grad

    def note(*given, **options):
        found = real(*given, **options)
        sizes.append(sum(float((g != 0).sum()) for g in found if g is not None))
        return found

    monkeypatch.setattr(torch.autograd, "grad", note)
    monkeypatch.setattr(tune, "STEPS", 1)
    large = F.interpolate(pictures(104, 2)[0], size=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trueup.calibrate(trained, large.split(52))
        trueup.calibrate(copy.deepcopy(trained).half(), large.half().split(52))
    whole, half = sizes[0], sizes[len(sizes) // 2]  # the first of each is of clean images
    assert half > 0.9 * whole
