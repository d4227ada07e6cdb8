"""The decision for inputs that are not one tensor of images: what is perturbed in them, and what is left as it is."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from architectures import images
from trueup.decide.contest import packed
from trueup.decide.perturb import Scale, perturb
from trueup.decide.pictures import kind_of, largest_image, perturb_all, reason_against, scales_of, together
from trueup.graph import Inputs

pytestmark = pytest.mark.usefixtures("one_answer_is_enough")


class Net(nn.Module):
    """Scores of one tensor of images, or of images in another form."""

    def __init__(self, form=lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.head = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 5)
        self.conv2, self.bn2, self.form = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), form

    def forward(self, x):
        x = F.relu(self.bn(self.conv(self.form(x))))
        return self.head(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))


def photographs(count: int) -> Tensor:
    return images(count, 12) * torch.linspace(0.5, 2, count)[:, None, None, None]


@pytest.fixture(scope="module")
def one_tensor(one_answer_is_enough):
    return trueup.calibrate(Net().eval(), photographs(60).split(20))


def same_trials(a, b):
    for one, other in zip(a.decision.trials, b.decision.trials, strict=True):
        assert one.rule == other.rule
        assert (one.images, one.changed, *one.kept) == pytest.approx((other.images, other.changed, *other.kept))
        assert one.moved == pytest.approx(other.moved, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("form", "batch"),
    [
        (torch.stack, list),  # images as detectors take them
        (lambda x: x["a"][0], lambda x: {"a": (x,), "ids": ["one"] * len(x)}),  # in a nested value
        (lambda x: x[:, 0], lambda x: x[:, None]),  # a video of one frame
        (lambda x: x[:, :, 0], lambda x: x[:, :, None]),  # channels before frames
    ],
    ids=["list", "nested", "frames", "channels and frames"],
)
def test_another_form_of_the_same_images_leads_to_the_same_decision(one_tensor, form, batch):
    loader = [batch(x) for x in photographs(60).split(20)]
    targets = trueup.calibrate(Net(form).eval(), loader, transform=lambda given: (given,))
    assert targets.decision.trials[0].images == 60
    same_trials(targets, one_tensor)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Net(), Net()

    def forward(self, image, other, weight=None):
        both = self.left(image) + 0.5 * self.right(other)
        return both if weight is None else both * weight[:, None]


def test_two_images_are_both_perturbed_and_the_decision_does_not_depend_on_batches():
    x, y, w = photographs(60), photographs(60).flip(0, 3), torch.rand(60) + 0.5
    model = Two().eval()
    whole = trueup.calibrate(model, [{"image": x, "other": y, "weight": w}])
    parts = [{"image": x[k], "other": y[k], "weight": w[k]} for k in torch.randperm(60).split(13)]
    same_trials(trueup.calibrate(model, parts), whole)
    assert all((norm.drift > 0).any() for norm in whole.norms.values())  # both branches saw perturbed images
    assert trueup.correct(model, whole)(x[:2], y[:2], w[:2]).shape == (2, 5)


def test_images_of_a_list_may_differ_in_size():
    small, large = photographs(30)[:, :, :8, :10], photographs(30)
    mixed = [image for pair in zip(small, large, strict=True) for image in pair]
    model = Padded().eval()
    targets = trueup.calibrate(model, [mixed[:17], mixed[17:]])
    assert targets.decision.trials[0].images == 60
    same_trials(trueup.calibrate(model, [mixed[::-1]]), targets)


class Padded(Net):
    def forward(self, pictures):
        return super().forward(torch.stack([F.pad(p, (0, 12 - p.shape[2], 0, 12 - p.shape[1])) for p in pictures]))


class Boxes(Padded):
    def forward(self, pictures):
        scores = super().forward(pictures)
        return [{"boxes": torch.zeros(3, 4), "scores": score} for score in scores]


def test_a_detector_declines_unless_it_is_told_what_its_answer_is():
    model, loader = Boxes().eval(), [list(x) for x in photographs(60).split(20)]
    with pytest.warns(UserWarning, match="the model's output is a list, not scores.*answer="):
        assert not trueup.calibrate(model, loader).decision.trials

    def top(found):
        return torch.stack([each["scores"].argmax() for each in found])

    targets = trueup.calibrate(model, loader, answer=top)
    assert targets.decision.trials[0].images == 60


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda n: torch.randn(n, 7, 16), r"torch.float32 of shape \(7, 16\) per image"),  # features
        (lambda n: torch.randint(9, (n, 7, 16)), r"torch.int64 of shape \(7, 16\) per image"),  # token ids
        (
            lambda n: torch.randn(n, 8, 8, 9, 9),
            r"torch.float32 of shape \(8, 8, 9, 9\) per image",
        ),  # neither channels nor frames
    ],
    ids=["features", "ids", "volume"],
)
def test_inputs_without_a_picture_decline_with_the_reason(make, said):
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(F.relu(self.norm(x.float().flatten(1)[:, :8])))

    with pytest.warns(UserWarning, match=f"it takes {said}, and only floating-point images or videos can be"):
        targets = trueup.calibrate(Features().eval(), [make(60)])
    assert targets.decision.chosen is None


def test_each_picture_is_perturbed_by_its_own_units_and_everything_else_is_left():
    x, depth, ids, mask = photographs(8), 100 + photographs(8)[:, :1], torch.arange(8), (photographs(8)[:, :1] > 0)
    batch = Inputs((x, ids), {"depth": {"map": depth}, "mask": mask.float(), "shared": torch.rand(3), "flag": True})
    scales, numbers = scales_of(lambda: [batch], None), torch.arange(8)
    out = perturb_all(batch, "noise", scales, numbers=numbers, level=1.0)
    assert out.args[0].equal(perturb(x, "noise", Scale.of_batches(lambda: [x]), numbers=numbers))
    units = Scale.of_batches(lambda: [depth])
    assert out.kwargs["depth"]["map"].equal(perturb(depth, "noise", units, numbers=numbers, seed=1))
    assert out.args[1] is ids
    assert all(out.kwargs[key] is batch.kwargs[key] for key in ("mask", "shared", "flag"))


@pytest.mark.parametrize("channels_at", [1, 2])
def test_the_tone_of_a_video_changes_alike_in_all_frames(channels_at):
    still = photographs(4)[:, :, None].expand(-1, -1, 6, -1, -1)
    video = still if channels_at == 1 else still.transpose(1, 2)
    batch = Inputs((video,))
    out = perturb_all(batch, "tone", scales_of(lambda: [batch], None), numbers=torch.arange(4), level=1.0).args[0]
    frames = out.movedim(3 - channels_at, 1)
    assert out.shape == video.shape
    assert not frames.isclose(still.transpose(1, 2)).all()
    torch.testing.assert_close(frames, frames[:, :1].expand_as(frames))


def test_the_units_are_measured_with_one_batch_in_memory():
    alive, x = [], photographs(12)

    def batches():
        for part in x.split(3):
            assert sum(ref() is not None for ref in alive) <= 1  # the one before
            batch = part.clone()
            alive.append(weakref.ref(batch))
            yield Inputs.of(batch)
            del batch

    scale = scales_of(batches, None)[0]
    pixels = x.transpose(0, 1).flatten(1)
    torch.testing.assert_close(scale.spread.flatten(), pixels.std(dim=1, correction=0))
    assert scale.low.flatten().equal(pixels.amin(1))
    assert scale.high.flatten().equal(pixels.amax(1))


def test_images_of_one_kind_go_together_and_come_apart_as_they_were():
    shared = torch.rand(5)
    batch = Inputs((photographs(4), {"ids": torch.arange(4)}), {"pair": list(photographs(4)), "shared": shared})
    singles = [batch.part(k, k + 1) for k in range(4)]
    assert len({kind_of(single) for single in singles}) == 1
    whole = together(singles)
    assert whole.args[0].equal(batch.args[0])
    assert whole.args[1]["ids"].equal(batch.args[1]["ids"])
    assert torch.stack(whole.kwargs["pair"]).equal(batch.args[0])
    assert whole.kwargs["shared"].equal(shared)
    taken = batch.take(torch.tensor([2, 0]))
    assert taken.args[0].equal(batch.args[0][[2, 0]])
    assert torch.stack(taken.kwargs["pair"]).equal(batch.args[0][[2, 0]])
    other = Inputs((photographs(1), {"ids": torch.arange(1)}), {"pair": list(photographs(1)), "shared": shared + 1})
    assert kind_of(other) != kind_of(singles[0])


def test_the_largest_image_of_a_list_limits_how_many_are_kept():
    assert largest_image(Inputs(([torch.zeros(3, 4, 4), torch.zeros(3, 10, 10)],))) == 1200
    assert largest_image(Inputs((torch.zeros(5, 3, 4, 4),))) == 192


def test_pictures_with_other_channels_cannot_be_perturbed_alike():
    assert "number of channels" in reason_against([Inputs((torch.rand(1, c, 8, 8),)) for c in (1, 3)])


@pytest.mark.parametrize("size", [1, 4, 100])
def test_copies_are_tried_in_batches_of_the_same_size_one_level_after_the_other(size):
    """Seven perturbations of a batch make seven small batches, which take more time per image."""
    rows = [torch.arange(n) for n in (5, 1, 9, 2)]
    levels = [1, 1, 1, 2]
    copies = [
        (level, Inputs((10.0 * k + some[:, None],), {}), some)
        for k, (level, some) in enumerate(zip(levels, rows, strict=True))
    ]
    found = list(packed(copies, size))
    for level, count in ((1, 15), (2, 2)):
        parts = [(inputs, some) for at, inputs, some in found if at == level]
        assert [len(some) for _, some in parts] == [size] * (count // size) + [count % size] * (count % size > 0)
        joined = torch.cat([inputs.args[0] for inputs, _ in parts])
        assert joined.equal(torch.cat([inputs.args[0] for at, inputs, _ in copies if at == level]))
        assert torch.cat([some for _, some in parts]).equal(joined[:, 0].long() % 10)
