"""`choose`: the strongest form of a rule within a share of changed answers, and what that share promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import trueup
from architectures import images, make
from trueup._choose import DOSES, doses_within

STRONG = trueup.Evidence(budget=1, strength=0.9, base=0.9)


def rounded(output):
    """An answer that changes more often than the most likely class of a network that was never trained."""
    return (50 * output[:, 0]).round()


@pytest.fixture(scope="module")
def resnet():
    model = make("resnet")
    return model, trueup.calibrate(model, images(64).split(32), decide=False)


@pytest.mark.parametrize("share", [0.02, 0.08, 0.15, 0.4])
def test_it_is_the_strongest_form_whose_changes_are_few_enough(resnet, share):
    """By trying them in turn, with answers and shares counted one by one."""
    model, targets = resnet
    clean = images(80, seed=5)
    with torch.no_grad():
        own, touched, expected = rounded(model(clean)).tolist(), set(), replace(STRONG, strength=0.0, base=0.0)
        for dose in DOSES:
            rule = replace(STRONG, strength=dose * STRONG.strength, base=dose * STRONG.base)
            said = rounded(trueup.correct(model, targets, rule)(clean)).tolist()
            touched |= {k for k in range(80) if said[k] != own[k]}
            if (len(touched) + 1) / 81 > share:
                break
            expected = rule
    assert trueup.choose(model, targets, clean.split(32), share, STRONG, answer=rounded) == expected


def test_shares_lead_to_different_forms(resnet):
    shares = (0.02, 0.08, 0.15, 0.4)
    chosen = [trueup.choose(*resnet, [images(80, seed=5)], share, STRONG, answer=rounded) for share in shares]
    doses = [rule.strength / STRONG.strength for rule in chosen]
    assert doses == sorted(set(doses))
    assert not chosen[0].changes
    assert chosen[-1] == STRONG


def test_as_many_images_as_it_asks_for_are_enough(resnet):
    assert trueup.choose(*resnet, [images(9)], 0.1, replace(STRONG, strength=1e-6, base=0.0)).changes


def test_without_a_rule_it_is_the_default_at_most(resnet):
    assert trueup.choose(*resnet, [(images(8), "labels")], 1.0) == trueup.Evidence()


def test_the_model_keeps_its_mode_and_its_weights(resnet):
    model, targets = resnet
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chosen = trueup.choose(model, targets, [images(80, seed=5)], 0.15, STRONG, answer=rounded)
    model.train()
    try:
        assert trueup.choose(model, targets, [images(80, seed=5)], 0.15, STRONG, answer=rounded) == chosen
        assert model.training
    finally:
        model.eval()
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_adds_up_what_it_sees_is_not_touched():
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.total.add_(x.mean())
            return self.body(x).mean(dim=(2, 3))

    model = Adding().eval()
    trueup.choose(model, trueup.calibrate(model, [images(12)], decide=False), [images(12)], 0.5)
    assert model.total.item() == 0


def test_pixels_count_by_their_share():
    """Half of each image always changes its answer, where a rule changes anything at all."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    targets = trueup.calibrate(model, [images(32)], decide=False)
    outputs: list[torch.Tensor] = []

    def answer(output):
        outputs.append(output)
        changed = not output.equal(outputs[0])
        said = torch.zeros(len(output), 4, 4)
        said[:, :2] = float(changed)
        return said

    assert trueup.choose(model, targets, [images(9)], 0.55, STRONG, answer=answer) == STRONG
    outputs.clear()
    assert not trueup.choose(model, targets, [images(9)], 0.54, STRONG, answer=answer).changes


def test_new_images_lose_no_more_than_was_asked_for_on_average():
    """Each image changes from a dose of its own on. Conformal risk control: E[lost] <= share, and not far below it."""
    generator = torch.Generator().manual_seed(0)
    doses, n, trials = torch.linspace(0, 1, 101)[1:], 60, 4000
    for share in (0.05, 0.2):
        risk = torch.zeros(trials)
        for trial in range(trials):
            own = torch.rand(n, generator=generator)
            taken = doses_within((own <= doses[:, None]).double(), share)
            risk[trial] = doses[taken - 1] if taken else 0.0
        error = float(risk.std()) / trials**0.5
        assert share - 2 / (n + 1) - 0.01 <= float(risk.mean()) <= share + 3 * error


def test_an_image_that_changes_back_counts_as_changed():
    lost = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    assert [doses_within(lost, share) for share in (0.1, 0.2, 0.4, 0.6, 1.0)] == [0, 1, 2, 4, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 0.5), ValueError, "the loader is empty"),
        ((images(2), 0.5), TypeError, "the loader is a tensor"),
        (([images(8)], 0.1), ValueError, r"max_changed=0.1\): 8 images are too few to bound .* give 9 or more"),
        (([images(8), images(8) / 0], 0.5), ValueError, "batch 1 of the loader contains NaN or infinity"),
        (([images(8)], 0), ValueError, "above 0 and at most 1"),
        (([images(8)], True), ValueError, "above 0 and at most 1"),
        (([images(8)], 0.5, trueup.Correction()), TypeError, "expected an Evidence"),
    ],
    ids=["empty", "tensor", "few", "infinite", "zero", "bool", "the paper's"],
)
def test_it_says_what_is_wrong(resnet, arguments, error, message):
    with pytest.raises(error, match=message):
        trueup.choose(*resnet, *arguments)


def test_it_says_that_an_output_holds_no_classes():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 30 * 30, 1))
    targets = trueup.calibrate(model.eval(), [images(8)], decide=False)
    with pytest.raises(ValueError, match=r"output is of shape \(8, 1\), not scores.*answer=lambda"):
        trueup.choose(model, targets, [images(8)], 0.5)


def test_the_model_is_traced_once(resnet, monkeypatch):
    models, trace = [], fx.Tracer.trace
    monkeypatch.setattr(
        fx.Tracer, "trace", lambda self, *args, **kw: models.append(args[0]) or trace(self, *args, **kw)
    )
    trueup.choose(*resnet, [images(8)], 1.0)
    assert len(models) == 1


def test_by_default_one_answer_in_two_hundred_may_change(resnet):
    with pytest.raises(ValueError, match=r"max_changed=0.005\): 8 images are too few.* give 199 or more"):
        trueup.choose(*resnet, [images(8)])


def test_the_chosen_rule_serves_correct(resnet):
    rule = trueup.choose(*resnet, [images(80, seed=5)], max_changed=0.15, rule=STRONG, answer=rounded)
    robust = trueup.correct(*resnet, rule)
    assert robust.rule == rule
    assert robust.sites


def test_only_selected_sites_are_tried(resnet):
    first = lambda site: site.name == "layer1.0.bn1"  # noqa: E731
    some = trueup.choose(*resnet, [images(80, seed=5)], 0.08, STRONG, answer=rounded, select=first)
    every = trueup.choose(*resnet, [images(80, seed=5)], 0.08, STRONG, answer=rounded)
    assert some.strength > every.strength
