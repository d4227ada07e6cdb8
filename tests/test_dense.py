"""Dense outputs: networks that say something of every pixel."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trueup
from trueup._answers import agreement, most_likely

EVERYWHERE = trueup.Evidence(budget=1.0, strength=0.1, base=0.05, depth=1.0)


class Pyramid(nn.Module):
    """A strided convolution, then dilated ones whose outputs are summed and concatenated; PReLU with learnt slopes."""

    def __init__(self, width: int = 6, *, as_dict: bool = False) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.PReLU(width)
        self.dilated = nn.ModuleList(nn.Conv2d(width, 3, 3, padding=d, dilation=d, bias=False) for d in (1, 2, 4))
        self.norm2 = nn.BatchNorm2d(9)
        self.act2 = nn.PReLU(9)
        self.classifier = nn.ConvTranspose2d(9, 4, 2, stride=2)
        self.as_dict = as_dict

    def forward(self, x):
        x = self.act(self.norm(self.down(x)))
        first, second, third = (convolution(x) for convolution in self.dilated)
        x = self.act2(self.norm2(torch.cat((first, second, second + third), dim=1)))
        logits = self.classifier(x)
        return {"out": logits, "aux": logits[:, :2]} if self.as_dict else logits


def pyramid(**options) -> Pyramid:
    torch.manual_seed(0)
    model = Pyramid(**options)
    for module in model.modules():
        if isinstance(module, nn.PReLU):
            nn.init.uniform_(module.weight, -0.3, 0.6)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.5)
    model.train()
    for _ in range(20):
        model(pictures(8))
    return model.eval()


def pictures(count: int, height: int = 24, width: int = 40, *, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 6, 10, generator=chance)
    return F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)


@pytest.fixture(scope="module")
def model():
    return pyramid()


@pytest.fixture(scope="module")
def targets(model):
    return trueup.calibrate(model, pictures(60).split(20), decide=False)


def test_prelu_is_an_activation_of_every_channels_own_slope(model, targets):
    found = trueup.sites(model)
    assert [(site.name, site.kind) for site in found] == [
        ("norm", "norm"),
        ("act", "activation"),
        ("norm2", "norm"),
        ("act2", "activation"),
    ]
    x = pictures(60)
    with torch.inference_mode():
        ordered = model.act(model.norm(model.down(x))).flatten(1).sort(dim=1).values
    exact = trueup.calibrate(model, x.split(20), resolution=None, method="sort", decide=False)
    torch.testing.assert_close(exact.activations["act"].target.float(), ordered.mean(0), rtol=1e-4, atol=1e-5)
    assert (ordered < 0).any()  # a slope below zero is no ReLU


@pytest.mark.parametrize("rule", [EVERYWHERE, trueup.Correction(lambda1=1.0, lambda2=0.2)], ids=["evidence", "paper"])
def test_both_rules_mend_shifted_pictures(model, targets, rule):
    """Pictures that are too bright: the corrected scores are nearer to those of the clean pictures."""
    x = pictures(24, seed=1)
    robust = trueup.correct(model, targets, rule)
    with torch.inference_mode():
        clean, before, after = model(x), model(x + 1.5), robust(x + 1.5)
    assert (after - clean).square().mean() < 0.5 * (before - clean).square().mean()
    assert agreement(after.argmax(1), clean.argmax(1)).mean() > agreement(before.argmax(1), clean.argmax(1)).mean()


@pytest.mark.parametrize("size", [(24, 40), (32, 32), (26, 58), (96, 160)], ids=str)
def test_other_sizes_than_calibrated_on_work_and_images_stay_apart(model, targets, size):
    x = pictures(3, *size, seed=3)
    for rule in (EVERYWHERE, trueup.Evidence(), trueup.Correction()):
        robust = trueup.correct(model, targets, rule)
        with torch.inference_mode():
            together, alone = robust(x), torch.cat([robust(one[None]) for one in x])
        assert together.shape == (3, 4, *size)
        assert together.isfinite().all()
        same = (together.argmax(1) == alone.argmax(1)).float().mean()
        assert same > 0.999


def test_a_rule_of_no_strength_changes_no_bit(model, targets):
    x = pictures(2, 26, 50)
    with torch.inference_mode():
        assert trueup.correct(model, targets, trueup.Evidence(strength=0, base=0))(x).equal(model(x))


def test_the_gate_opens_for_a_camera_frame_that_is_unusual_and_not_for_a_clean_one(model):
    """360 x 480: the gate reads whole maps, each image on its own."""
    clean = pictures(40, 360, 480)
    clean = clean + 0.02 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    known = trueup.calibrate(model, clean.split(10), decide=False)
    robust = trueup.correct(model, known, trueup.Evidence(budget=0.01, least=0.0))
    fresh = pictures(6, 360, 480, seed=9) + 0.02 * torch.randn(
        6, 3, 360, 480, generator=torch.Generator().manual_seed(2)
    )
    noisy = fresh + torch.randn(fresh.shape, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        untouched = [robust(x[None]).equal(model(x[None])) for x in fresh]
        touched = [not robust(x[None]).equal(model(x[None])) for x in noisy]
    assert all(touched)
    assert sum(untouched) >= 3


def test_a_dictionary_comes_back_as_one_and_its_first_scores_are_the_answer(targets):
    model, x = pyramid(as_dict=True), pictures(3, seed=5)
    known = trueup.calibrate(model, pictures(60).split(20), decide=False)
    robust, usual = trueup.correct(model, known, EVERYWHERE), trueup.correct(pyramid(), targets, EVERYWHERE)
    with torch.inference_mode():
        found, plain = robust(x), usual(x)
    assert list(found) == ["out", "aux"]
    torch.testing.assert_close(found["out"], plain)
    assert most_likely(found).equal(plain.argmax(1))


def test_of_several_heads_the_first_is_the_answer_and_all_come_back():
    """Deep supervision: the same scores at half the resolution, as a second head. The list holds no boxes."""

    class Heads(Pyramid):
        def forward(self, x):
            logits = super().forward(x)
            return [logits, F.avg_pool2d(logits, 2)]

    model, x = Heads(), pictures(3, seed=5)
    model.load_state_dict(pyramid().state_dict())
    chosen = trueup.calibrate(model.eval(), pictures(60).split(20), progress=False)
    assert chosen.rule.changes
    found = trueup.correct(model, chosen)(x)
    assert [each.shape for each in found] == [(3, 4, 24, 40), (3, 4, 12, 20)]
    assert most_likely(found).equal(most_likely(tuple(found)))
    assert most_likely(found).equal(found[0].argmax(1))


def test_agreement_is_the_share_of_an_images_pixels():
    a = torch.zeros(2, 4, 5, dtype=torch.long)
    b = a.clone()
    b[1, :2] = 3
    assert agreement(a, b).tolist() == [1.0, 0.5]


def test_calibration_decides_by_pixels_and_helps_on_a_shift_it_has_not_seen():
    model = pyramid(as_dict=True)
    chosen = trueup.calibrate(model, pictures(60).split(20), progress=False)
    assert chosen.rule is not None
    assert chosen.rule.changes
    trial = next(trial for trial in chosen.decision.trials if trial.rule == chosen.rule)
    assert 0 < trial.changed < 60
    assert not math.isclose(trial.changed, round(trial.changed))  # shares of pixels, not whole images
    x = pictures(24, seed=1)
    harmed = x + 1.5
    robust = trueup.correct(model, chosen)
    with torch.inference_mode():
        clean, before, after = (most_likely(output) for output in (model(x), model(harmed), robust(harmed)))
    assert agreement(after, clean).mean() > agreement(before, clean).mean()


def test_the_budget_of_choose_is_a_share_of_pixels_and_images_are_what_counts(model, targets):
    """By hand: an image counts by its share of changed pixels, and one image that changes wholly is added."""
    unseen = pictures(99, seed=7)
    rule = trueup.Evidence(budget=1.0, strength=0.3, base=0.3, depth=1.0)
    chosen = trueup.choose(model, targets, unseen.split(33), max_changed=0.025, rule=rule)
    assert 0 < chosen.strength < rule.strength
    with torch.inference_mode():
        own = model(unseen).argmax(1)
        changed = (trueup.correct(model, targets, chosen)(unseen).argmax(1) != own).double().mean(dim=(1, 2))
    assert (changed.sum() + 1) / 100 <= 0.025
    assert 0 < changed.max() < 1
    with pytest.raises(ValueError, match="18 images are too few"):  # pixels by the thousand do not help
        trueup.choose(model, targets, [unseen[:18]], max_changed=0.05, rule=rule)


COLOURS = torch.tensor([[0.0, 0.0, 0.0], [1.2, 0.2, 0.2], [0.2, 1.2, 0.2], [0.2, 0.2, 1.2], [1.2, 1.2, 0.3]])


def fields(
    count: int, seed: int, *, apart: float, size: tuple[int, int] = (24, 32)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fields of five colours with their classes. The larger `apart`, the more of a picture is of one class."""
    draw = torch.Generator().manual_seed(seed)
    height = 0.6 * torch.randn(count, 5, 3, 4, generator=draw) + apart * torch.randn(count, 5, 1, 1, generator=draw)
    classes = F.interpolate(height, size=size, mode="bilinear").argmax(1)
    noise = 0.25 * torch.randn(count, 3, *size, generator=draw)
    return COLOURS[classes].permute(0, 3, 1, 2) + noise - 0.4, classes


def trained_on(apart: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.PReLU(8),
        nn.Conv2d(8, 16, 3, padding=2, dilation=2, bias=False),
        nn.BatchNorm2d(16),
        nn.PReLU(16),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.PReLU(16),
        nn.ConvTranspose2d(16, 5, 2, stride=2),
    )
    images, classes = fields(256, 1, apart=apart)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for some in torch.arange(256).split(32) * 5:  # five times
        optimiser.zero_grad()
        F.cross_entropy(model(images[some]), classes[some]).backward()
        optimiser.step()
    return model.eval()


def mean_iou(model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> float:
    """In percent."""
    with torch.inference_mode():
        said = model(images).argmax(1)
    each = [((said == k) & (classes == k)).sum() / ((said == k) | (classes == k)).sum() for k in range(5)]
    return 100 * float(torch.stack(each).mean())


def test_a_harmful_default_does_not_come_back_for_answers_per_pixel():
    """Most of a picture is one field, so its statistics tell what it shows. Moving them to the mean is wrong."""
    model = trained_on(apart=3.0)
    targets = trueup.calibrate(model, fields(100, 2, apart=3.0)[0].split(25))
    images, classes = fields(200, 9, apart=3.0)
    faint = 0.3 * images
    before, robust = mean_iou(model, images, classes), trueup.correct(model, targets)
    fixed = trueup.correct(model, targets, EVERYWHERE)
    assert mean_iou(fixed, images, classes) < before - 2, "a fixed rule should harm this network"
    assert mean_iou(fixed, faint, classes) < mean_iou(model, faint, classes) - 10
    assert mean_iou(robust, images, classes) > before - 0.5
    assert mean_iou(robust, faint, classes) > mean_iou(model, faint, classes) - 3


def test_learned_weights_help_a_network_that_answers_per_pixel_at_any_size():
    model = trained_on(apart=0.5)
    targets = trueup.calibrate(model, fields(120, 2, apart=0.5)[0].split(30))
    assert targets.rule.tuned
    robust = trueup.correct(model, targets)
    for size in ((24, 32), (50, 38)):
        images, classes = fields(200, 9, apart=0.5, size=size)
        assert mean_iou(robust, images, classes) > mean_iou(model, images, classes) - 1
        for shifted in (0.3 * images, images + 1):
            assert mean_iou(robust, shifted, classes) > mean_iou(model, shifted, classes) + 4
