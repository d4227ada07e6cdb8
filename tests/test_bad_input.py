"""Bad inputs, and the errors that they raise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trueup
from architectures import images, make

PAPER = trueup.Correction()


@pytest.mark.parametrize("loader", [[], iter(()), [torch.zeros(0, 3, 32, 32)]], ids=["list", "iterator", "empty batch"])
def test_an_empty_loader(loader):
    with pytest.raises(ValueError, match="loader is empty"):
        trueup.calibrate(make("vgg"), loader, decide=False)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (torch.zeros(2, 1, 32, 32), ValueError, r"Sequential does not take images of shape \(2, 1, 32, 32\)"),
        (torch.zeros(2, 3, 9, 9), ValueError, r"does not take images of shape \(2, 3, 9, 9\)"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), ValueError, "uint8; convert integer images to floating point"),
        ({"image": torch.zeros(2, 3, 32, 32)}, ValueError, r"does not take.*'image'.*lambda batch: batch\['image'\]"),
        (torch.tensor([3, 1, 4]), TypeError, r"batch 0 of the loader is of shape \(3,\).*look like labels"),
        (torch.zeros(3, 32, 32), ValueError, r"a single image needs a batch dimension: image\[None\]"),
        ("cat.png", TypeError, "batch 0 of the loader is a str"),
        ((), TypeError, "batch 0 of the loader is a tuple"),
        (torch.full((2, 3, 32, 32), torch.nan), ValueError, "batch 0 of the loader contains NaN"),
    ],
    ids=["channels", "size", "integers", "dict", "labels", "one image", "text", "empty tuple", "NaN"],
)
def test_a_batch_that_the_model_cannot_take(batch, error, message):
    with pytest.raises(error, match=message):
        trueup.calibrate(make("vgg"), [batch], decide=False)


def test_one_image_that_a_convolution_takes_is_noticed():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())  # takes (channels, height, width) as well
    with pytest.raises(ValueError, match=r"not on one of their 3 rows.*give a batch: image\[None\]"):
        trueup.calibrate(model, [images(1)[0]], decide=False)


def test_integer_images_go_to_a_model_that_takes_them():
    class Normalise(nn.Module):
        def forward(self, x):
            return x.float() / 255

    model = nn.Sequential(Normalise(), make("vgg"))
    x = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    targets = trueup.calibrate(model, [x], decide=False)
    assert trueup.correct(model, targets, PAPER)(x).shape == (4, 10)


def test_a_model_without_a_site():
    with pytest.raises(ValueError, match=r"Sequential has no site.*activations=\(MyActivation, my_function\)"):
        trueup.calibrate(nn.Sequential(nn.Linear(3, 3)), [torch.zeros(2, 3)], decide=False)
    with pytest.raises(ValueError, match="has no site"):
        trueup.calibrate(make("vgg"), [images(2)], select=lambda site: False, decide=False)


def test_activations_that_overflow_in_calibration_are_named():
    model = make("vgg")
    with torch.no_grad():
        model[3].weight.mul_(1e38)
    with pytest.raises(ValueError, match="site '4' overflow"):
        trueup.calibrate(model, [images(2) * 1e10], decide=False)


def test_sites_whose_rows_are_not_images_are_left_and_listed():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(x.transpose(0, 1)).transpose(0, 1)

    with pytest.raises(ValueError, match=r"has no site.*left alone, because their rows are not images: norm"):
        trueup.calibrate(First(), [torch.randn(5, 7, 4)], decide=False)
    targets = trueup.calibrate(nn.Sequential(nn.ReLU(), First()), [torch.randn(5, 7, 4)], decide=False)
    assert list(targets.activations) == ["0"]
    assert not targets.norms
    assert "Left alone, because their rows are not images: 1.norm." in str(targets)


def test_norms_that_only_the_gate_reads_must_not_overflow_either():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.early, self.late, self.last = (nn.InstanceNorm2d(3, affine=True) for _ in range(3))
            nn.init.constant_(self.early.weight, 1e30)

        def forward(self, x):
            return self.last(self.early(x).clamp(-1, 1) + self.late(x)).relu()

    model, late = Branches(), lambda site: site.name != "early"
    with pytest.raises(ValueError, match="site 'early' overflow"):
        trueup.calibrate(model, [images(4)], select=late, decide=False)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_an_image_that_is_not_finite_spoils_no_other(poison):
    model, x = make("resnet"), images(6)
    robust = trueup.correct(model, trueup.calibrate(model, [x], decide=False), trueup.Correction(1, 0))
    clean = robust(x)
    x[2, 0, 5, 5] = poison
    out = robust(x)
    assert not out[2].isfinite().all()
    torch.testing.assert_close(out[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])
    shift = trueup.measure(model, trueup.calibrate(model, [images(6)], decide=False), x)
    assert shift.distance[[0, 1, 3, 4, 5]].isfinite().all()
    assert not shift.distance[2].isfinite().any()
    assert shift.activation_rank[2].tolist() == [1.0] * len(shift.activations)


def test_the_corrected_module_moves_with_its_targets_and_without_the_model():
    """The meta device stands in for a second one: a tensor left behind would be refused."""
    model, x = make("vgg"), images(4)
    targets = trueup.calibrate(model, [x], decide=False)
    moved = trueup.correct(model, targets, PAPER).to("meta")
    assert moved(x.to("meta")).device.type == "meta"
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.gpu
def test_images_and_targets_go_to_the_models_device():
    model, x = make("vgg").cuda(), images(4)
    targets = trueup.calibrate(model, [x], decide=False)
    assert trueup.correct(model, targets, trueup.Correction())(x.cuda()).is_cuda
    assert trueup.measure(model, targets, x).distance.device.type == "cpu"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, t: trueup.calibrate(m, images(2), decide=False), TypeError, r"loader is a tensor.*\[images\]"),
        (lambda m, t: trueup.correct(m, "vgg.safetensors"), TypeError, r"got str; .*Targets\.load"),
        (lambda m, t: trueup.correct(m, t, 0.5), TypeError, r"rule=0.5\): expected a rule"),
        (
            lambda m, t: trueup.correct(m, t, PAPER, select=lambda site: False),
            ValueError,
            "select= matches none.*1, 4, 7, 11",
        ),
        (
            lambda m, t: trueup.measure(trueup.correct(m, t, PAPER), t, images(2)),
            TypeError,
            "give the model that it was made",
        ),
        (lambda m, t: trueup.calibrate([images(2)], m), TypeError, r"the model is a list.*calibrate\(model, loader\)"),
        (lambda m, t: trueup.calibrate(m, m), TypeError, "the loader is a Sequential.*the model comes first"),
        (lambda m, t: trueup.correct(t, m), TypeError, "expected Targets, got Sequential"),
        (lambda m, t: trueup.measure(m, images(2), t), TypeError, "measure: expected Targets, got Tensor"),
        (lambda m, t: trueup.choose(m, [images(2)], t), TypeError, "choose: expected Targets, got list"),
        (lambda m, t: trueup.correct(m, t, PAPER, select=["1"]), TypeError, r"select=\['1'\]: expected a predicate"),
        (lambda m, t: trueup.sites(m, select=["1"]), TypeError, "expected a predicate on a Site"),
        (lambda m, t: trueup.calibrate(m, [images(2)], resolution="high"), TypeError, "resolution='high'.*number of"),
        (lambda m, t: trueup.calibrate(m, [images(2)], images=0), ValueError, "images=0: expected a number of images"),
        (lambda m, t: trueup.calibrate(m, [images(2)], transform=3), TypeError, "transform=3: expected a function"),
        (lambda m, t: trueup.sites(m, activations=nn.Mish), TypeError, "expected a tuple"),
        (lambda m, t: trueup.sites(m, activation=(nn.Mish,)), TypeError, "unexpected keyword argument 'activation'"),
        (lambda m, t: trueup.calibrate(m, [images(2)], resolution=1), ValueError, "resolution=1.*2 or more"),
        (lambda m, t: trueup.calibrate(m, [images(2)], answer="label"), TypeError, "answer='label'.*a function"),
    ],
)
def test_slips_of_the_pen(call, error, message):
    model = make("vgg")
    with pytest.raises(error, match=message):
        call(model, trueup.calibrate(model, [images(2)], decide=False))
