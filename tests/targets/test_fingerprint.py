"""A model's fingerprint: what it holds, and which models it tells apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import trueup
from architectures import images, make
from trueup.targets.fingerprint import Fingerprint


class TestFingerprint:
    def test_holds_the_norm_and_a_projection_of_each_tensor(self, monkeypatch):
        model = make("mobilenet").bfloat16()
        for small in (1, 100, 1 << 16):  # alone or with others of their length
            monkeypatch.setattr("trueup.targets.fingerprint.SMALL", small)
            prints = Fingerprint.of(model).tensors
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    values = tensor.double().flatten().numpy()
                    assert prints[name].shape == tuple(tensor.shape)
                    assert prints[name].norm == pytest.approx(np.sqrt((values**2).sum()))
                    assert prints[name].projection == pytest.approx((np.cos(np.arange(values.size)) * values).sum())

    def test_another_precision_is_the_same_model(self):
        fingerprint = Fingerprint.of(make("mobilenet"))
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            assert fingerprint.difference(Fingerprint.of(make("mobilenet").to(dtype))) == ""

    @pytest.mark.parametrize(("share", "same"), [(0.005, True), (0.02, False), (0.09, False)])
    def test_a_projection_may_move_by_a_hundredth_of_the_norm(self, share, same):
        """More is allowed for quantised weights only."""
        model = make("mobilenet")
        before, weight = Fingerprint.of(model), model.head.weight
        direction = torch.arange(weight.numel()).cos().view_as(weight)
        with torch.no_grad():
            weight += share * weight.norm() * direction / direction.square().sum()
        difference = before.difference(Fingerprint.of(model))
        assert difference == "" if same else "'head.weight' has other values" in difference

    def test_a_mask_of_infinities_belongs_to_its_own_model(self):
        model = make("mobilenet")
        model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        targets = trueup.calibrate(model, [images(4)], decide=False)
        assert trueup.correct(model, targets, trueup.Correction()) is not None
        model.mask.neg_()
        with pytest.raises(ValueError, match="'mask' has other values"):
            trueup.correct(model, targets, trueup.Correction())

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda m: nn.init.normal_(m.head.weight, std=0.2), "'head.weight' has other values"),
            (lambda m: m.stem[1].running_mean.add_(0.1), "'stem.1.running_mean' has other values"),
            (lambda m: m.head.bias.data.neg_(), "'head.bias' has other values"),
            (lambda m: m.head.weight.data.copy_(m.head.weight.data.roll(1)), "'head.weight' has other values"),
            (lambda m: setattr(m, "head", nn.Linear(8, 7)), r"'head.weight' has shape \(10, 8\) in one and \(7, 8\)"),
            (lambda m: m.head.register_parameter("bias", None), "only one of them has .*'head.bias'"),
            (lambda m: setattr(m, "extra", nn.Linear(2, 2)), "only one of them has .*'extra.weight'"),
        ],
        ids=["retrained", "running mean", "sign", "permuted", "shape", "missing", "more"],
    )
    def test_the_wrong_model_is_refused_by_name_of_what_differs(self, change, named):
        model = make("mobilenet")
        targets = trueup.calibrate(model, [images(4)], decide=False)
        with torch.no_grad():
            change(model)
        for verb in (trueup.correct, lambda m, t: trueup.measure(m, t, images(2))):
            with pytest.raises(ValueError, match=f"calibrated on another model than this MobileNet: .*{named}"):
                verb(model, targets)

    def test_sites_that_the_model_does_not_have_are_named(self):
        model = make("mobilenet")
        targets = trueup.calibrate(model, [images(4)], decide=False)
        model.blocks[1].conv[0][2] = nn.Identity()
        with pytest.raises(
            ValueError, match="'blocks.1.conv.0.2', which was not found in this MobileNet; it has stem.2, blocks.0"
        ):
            trueup.correct(model, targets, trueup.Correction())


def test_infinite_values_such_as_those_of_a_mask_are_equal_to_themselves():
    def masked(*, above: float) -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        model.register_buffer("mask", torch.full((4, 4), above).triu(1))
        model[0].requires_grad_(False).weight.fill_(1)
        model[0].bias.zero_()
        return model

    infinite, lowest = (Fingerprint.of(masked(above=value)) for value in (-torch.inf, torch.finfo(torch.float32).min))
    assert not infinite.difference(Fingerprint.from_json(infinite.to_json()))
    assert not lowest.difference(Fingerprint.of(masked(above=torch.finfo(torch.float32).min).half()))
    assert "'mask'" in infinite.difference(Fingerprint.of(masked(above=torch.inf)))
