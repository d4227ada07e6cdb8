"""Inputs and outputs as people have them: several tensors, names, dictionaries, lists of images, dataclasses."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trueup
from architectures import images, make

RULE = trueup.Evidence(budget=1, strength=0.2)


class Two(nn.Module):
    """Takes an image and a depth map, and an optional mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.depth = nn.Conv2d(3, 4, 3), nn.Conv2d(1, 4, 3)
        self.bn, self.bn2, self.head = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Linear(4, 10)

    def forward(self, image, depth, mask=None):
        x = F.relu(self.bn(self.conv(image))) + F.relu(self.bn2(self.depth(depth)))
        if mask is not None:
            x = x * mask
        return self.head(x.mean((2, 3)))


@dataclass
class Answer:
    logits: Tensor
    features: tuple[Tensor, ...]


class Named(nn.Module):
    """Written as Hugging Face writes models: the first input has a default, and the output is a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make("resnet")

    def forward(self, pixel_values=None, labels=None, output_features=False):
        if pixel_values is None:
            raise ValueError("You have to specify pixel_values")
        logits = self.body(pixel_values)
        return Answer(logits, (logits,) if output_features else ())


class Detector(nn.Module):
    """Takes a list of images of different sizes; its head sees a different number of proposals per image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.fc, self.act, self.score = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, pictures: list[Tensor]):
        sides = [max(p.shape[k] for p in pictures) for k in (1, 2)]
        x = torch.stack([F.pad(p, (0, sides[1] - p.shape[2], 0, sides[0] - p.shape[1])) for p in pictures])
        x = self.bn(self.conv(x)).relu()
        rows = [x[k, :, :: 2 + k, 0].T for k in range(len(pictures))]  # proposals
        scores = self.score(self.act(self.fc(torch.cat(rows))))
        return [{"scores": s} for s in scores.split([len(r) for r in rows])]


def depth(count, seed=1):
    return images(count, seed=seed)[:, :1]


def test_a_model_of_two_inputs_takes_the_first_two_entries_of_a_batch():
    model = Two().eval()
    loader = DataLoader(TensorDataset(images(12), depth(12), torch.zeros(12)), batch_size=6)
    targets = trueup.calibrate(model, loader, decide=False)
    assert list(targets.norms) == ["bn", "bn2"]
    assert targets.images == 12
    by_name = [{"depth": d, "image": x, "label": y} for x, d, y in loader]
    assert trueup.calibrate(model, by_name, decide=False) == targets
    chosen = trueup.calibrate(
        model, by_name, transform=lambda b: {"image": b["image"], "depth": b["depth"]}, decide=False
    )
    assert chosen == targets
    robust = trueup.correct(model, targets, RULE)
    x, d = images(4) - 1, depth(4) + 2
    assert robust(depth=d, image=x).equal(robust(x, d))
    torch.testing.assert_close(torch.cat([robust(a[None], b[None]) for a, b in zip(x, d, strict=True)]), robust(x, d))
    shift = trueup.measure(model, targets, (x, d))
    assert shift.evidence.shape == (4, 2)
    assert trueup.measure(model, targets, {"image": x, "depth": d}).evidence.equal(shift.evidence)
    assert trueup.choose(model, targets, loader, 0.5, RULE).strength <= RULE.strength
    assert len(trueup.sites(model, (x, d))) == 4


def test_the_calibration_of_several_inputs_does_not_depend_on_batches():
    model = Two().eval()
    parts = [(images(12)[k : k + n], depth(12)[k : k + n]) for k, n in ((0, 5), (5, 1), (6, 6))]
    whole = trueup.calibrate(model, [(images(12), depth(12))], decide=False)
    split = trueup.calibrate(model, parts, decide=False)
    assert split.sampled.equal(whole.sampled)
    torch.testing.assert_close(split.norms["bn2"].total, whole.norms["bn2"].total)


@pytest.mark.parametrize("batch", [dict, UserDict], ids=["dict", "UserDict"])
def test_a_first_input_with_a_default_is_an_input(batch):
    model = Named().eval()
    loader = [batch({"pixel_values": x, "labels": torch.zeros(len(x))}) for x in images(24).split(8)]
    targets = trueup.calibrate(model, loader, decide=False)
    assert targets.sites.traced
    assert targets == trueup.calibrate(model, images(24).split(8), decide=False)
    robust = trueup.correct(model, targets, RULE)
    out = robust(pixel_values=images(3) - 1)
    assert isinstance(out, Answer)
    assert out.logits.equal(robust(images(3) - 1).logits)
    assert not out.logits.isclose(model(images(3) - 1).logits).all()
    assert robust(images(3) - 1, output_features=True).features[0].equal(out.logits)
    with pytest.raises(ValueError, match="You have to specify pixel_values"):
        robust()


def test_a_dataclass_has_an_answer_to_decide_by():
    model = Named().eval()
    with pytest.warns(UserWarning, match="left as it is"):
        targets = trueup.calibrate(model, [{"pixel_values": images(10)}])
    assert "10 different images are too few" in str(targets)
    assert trueup.choose(model, targets, [{"pixel_values": images(10)}], 0.5, RULE)


def test_lists_of_images_of_different_sizes():
    model = Detector().eval()
    sizes = [(16, 24), (24, 16), (16, 16), (24, 24)]
    pictures = [images(1, 24, seed=k)[0, :, : s[0], : s[1]] for k, s in enumerate(sizes)]
    labels = [{"boxes": torch.zeros(1, 4)}] * 4
    targets = trueup.calibrate(model, [(pictures, labels), (pictures[::-1], labels)], decide=False)
    assert not targets.sites.traced
    assert list(targets.norms) == ["bn"]
    assert targets.sites.left == ("act",)  # proposals, not images
    assert targets.images == 8
    assert trueup.calibrate(model, [pictures, pictures[::-1]], decide=False) == targets
    robust = trueup.correct(model, targets, RULE)
    assert [len(r["scores"]) for r in robust(pictures)] == [len(r["scores"]) for r in model(pictures)]
    assert not robust(pictures)[0]["scores"].isclose(model(pictures)[0]["scores"]).all()


@pytest.mark.parametrize("shape", [(12, 20), (1, 20)])
def test_signals_alone_in_a_list_are_a_batch_of_signals(shape):
    """As `DataLoader(TensorDataset(signals))` gives them; the last batch has three, as an image has channels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(shape[0], 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten()).eval()
    signals = torch.randn(19, *shape)
    targets = trueup.calibrate(model, DataLoader(TensorDataset(signals), batch_size=8), decide=False)
    assert targets.images == 19
    assert targets == trueup.calibrate(model, signals.split(8), decide=False)
    trueup.correct(model, targets, RULE)(signals[:2])


def test_one_image_alone_in_a_list_is_an_image():
    pictures = [images(1, 24, seed=k)[0, :, :16] for k in range(3)]
    targets = trueup.calibrate(Detector().eval(), [[picture] for picture in pictures], decide=False)
    assert targets.images == 3


def test_images_limits_by_images():
    model = make("resnet")
    few = trueup.calibrate(model, images(24).split(8), images=12, decide=False)
    assert few.images == 12
    assert few.norms["layer1.0.bn1"].total.equal(
        trueup.calibrate(model, [images(24)[:8], images(24)[8:12]], decide=False).norms["layer1.0.bn1"].total
    )

    def endless():
        while True:
            yield images(8)

    assert trueup.calibrate(model, endless(), images=16, decide=False).images == 16


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((images(2),), TypeError, r"has 1 entries, but the forward pass of Two takes image, depth.*transform="),
        (
            {"image": images(2), "depth": depth(2), "id": torch.arange(2)},
            TypeError,
            r"has the entries 'image', 'depth', 'id', but .* Two takes image, depth, mask, not 'id'; .*transform=",
        ),
        ({"image": images(2)}, ValueError, "Two does not take"),
    ],
)
def test_a_batch_that_does_not_fit_the_inputs(batch, error, message):
    with pytest.raises(error, match=message):
        trueup.calibrate(Two(), [batch], decide=False)


def test_further_entries_of_a_batch_are_not_dropped_in_silence():
    with pytest.warns(UserWarning, match="of the 4 entries of a batch, the first 2 go to Two and the others are not"):
        trueup.calibrate(Two().eval(), [(images(2), depth(2), torch.zeros(2), torch.zeros(2))], decide=False)


def test_a_model_that_takes_the_dictionary_itself():
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Two()

        def forward(self, batch):
            return {"logits": self.body(batch["rgb"], batch["d"])}

    model = Whole().eval()
    targets = trueup.calibrate(model, [{"rgb": images(6), "d": depth(6)}], decide=False)
    robust = trueup.correct(model, targets, RULE)
    assert robust({"rgb": images(2), "d": depth(2)})["logits"].shape == (2, 10)
