"""Learned weights: calibration learns how much the evidence of each channel counts."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import trueup
from test_decision import Small, pictures, trained  # noqa: F401  # a fixture
from trueup._answers import divergence
from trueup.decide import search
from trueup.decide.tune import START


@pytest.fixture(scope="module")
def decided(trained):  # noqa: F811
    return trueup.calibrate(trained, pictures(160, 2)[0].split(40))


def test_learned_weights_bring_answers_on_shifted_images_nearer_to_those_on_clean_ones(trained, decided):  # noqa: F811
    """The same setting but for the weights, on new images and a shift that was not shown."""
    clean = pictures(300, 11)[0]
    shifted = 0.5 * clean + 1
    fixed, learned = (
        trueup.correct(trained, decided, replace(START, nuisance=tuned is False, tuned=tuned))
        for tuned in (False, True)
    )
    with torch.inference_mode():
        said = trained(clean)
        before, after = (float(divergence(said, network(shifted)).mean()) for network in (fixed, learned))
        assert after < 0.8 * before
        assert float(divergence(said, learned(clean)).mean()) < 0.05


def test_the_model_is_not_touched_by_learning(trained):  # noqa: F811
    model = copy.deepcopy(trained)
    model.head.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    targets = trueup.calibrate(model, pictures(100, 2)[0].split(50))
    assert any(norm.weights is not None for norm in targets.norms.values())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]


def test_weights_do_not_depend_on_batches_or_order(trained, decided):  # noqa: F811
    images = pictures(160, 2)[0]
    again = trueup.calibrate(trained, images[torch.randperm(160)].split(160))
    for name, norm in decided.norms.items():
        if norm.weights is not None:
            torch.testing.assert_close(again.norms[name].weights, norm.weights, rtol=0.05, atol=1e-3)


def test_images_that_tune_are_not_those_that_try(decided):
    assert decided.decision.trials[0].images == 80


def test_with_too_few_images_for_both_fixed_settings_are_tried_on_all(trained):  # noqa: F811
    targets = trueup.calibrate(trained, pictures(60, 2)[0].split(30))
    assert targets.decision.trials[0].images == 60
    assert all(norm.weights is None for norm in targets.norms.values())
    assert not targets.rule.tuned
    with pytest.raises(ValueError, match="needs learned weights, and these targets hold none"):
        trueup.correct(trained, targets, trueup.Evidence(tuned=True))


def test_settings_beyond_a_limit_on_clean_images_are_counted_but_not_tried_further(trained, monkeypatch):  # noqa: F811
    monkeypatch.setattr("trueup.targets.decision.MAX_MOVED", 0.01)
    targets = trueup.calibrate(trained, pictures(160, 2)[0].split(40))
    tried, refused = len(targets.decision.trials) - 1, targets.decision.refused
    assert tried
    assert refused
    assert tried + refused == len(search.TUNED_CANDIDATES)
    assert all(trial.mean_moved <= 0.01 for trial in targets.decision.trials)
    assert f"chosen among {len(search.TUNED_CANDIDATES)} settings" in str(targets)


class Stubborn(Small):
    """A model without derivatives."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def test_a_model_without_derivatives_gets_fixed_settings_and_a_warning(trained):  # noqa: F811
    model = Stubborn().eval()
    model.load_state_dict(trained.state_dict())
    with pytest.warns(
        UserWarning, match="no weights could be learned, because the model cannot be differentiated"
    ) as caught:
        targets = trueup.calibrate(model, pictures(120, 2)[0].split(40))
    assert [warning.filename for warning in caught] == [__file__]
    assert targets.decision.trials[0].images == 60
    assert targets.rule.changes
    assert not targets.rule.tuned


def test_too_little_memory_to_learn_is_called_that(trained, monkeypatch):  # noqa: F811
    def fail(*_):
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")

    monkeypatch.setattr("trueup.decide.tune._learn", fail)
    with pytest.warns(UserWarning, match=r"the device has too little memory \(Tried to allocate 20 GiB\)"):
        targets = trueup.calibrate(trained, pictures(120, 2)[0].split(40))
    assert targets.rule.changes


def test_ranks_of_few_images_each_try_fixed_settings(trained, monkeypatch):  # noqa: F811
    """Half of three images would be none for each rank to learn from. Here, 40 ranks have the same three."""
    monkeypatch.setattr(search, "gathered", lambda value: [value] * 40)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is left as it is")
        targets = trueup.calibrate(trained, [pictures(3, 2)[0]])
    assert targets.decision.trials[0].images == 120
    assert all(norm.weights is None for norm in targets.norms.values())


def test_learning_works_in_inference_mode(trained, decided):  # noqa: F811
    with torch.inference_mode():
        targets = trueup.calibrate(trained, pictures(160, 2)[0].split(40))
    assert targets.rule == decided.rule


class Heights(nn.Module):
    """Two numbers per image, in some unit, as a dictionary."""

    def __init__(self, body: nn.Module, unit: float) -> None:
        super().__init__()
        self.body, self.unit = body, unit

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"heights": self.body(x)[:, :2] * self.unit}


def test_for_outputs_that_are_no_class_scores_their_unit_does_not_matter(trained):  # noqa: F811
    """Probabilities would depend on it."""
    metres, millimetres = (
        trueup.calibrate(
            Heights(trained, unit).eval(),
            pictures(120, 2)[0].split(40),
            answer=lambda output, unit=unit: (output["heights"] / unit).round().long(),
        )
        for unit in (1.0, 1000.0)
    )
    for name, norm in metres.norms.items():
        if norm.weights is not None:
            torch.testing.assert_close(millimetres.norms[name].weights, norm.weights, rtol=0.05, atol=1e-3)


def test_learned_weights_are_for_bands_and_instead_of_nuisance_shares():
    for setting in ({"bands": False}, {"nuisance": True}):
        with pytest.raises(ValueError, match="tuned=True"):
            trueup.Evidence(tuned=True, **setting)
