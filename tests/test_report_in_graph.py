"""`correct(report=True)`: the report comes from inside the graph, changes no answer, and is what `measure` finds."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import trueup
from architectures import ALL, images, make

RULES = {
    "nothing": trueup.Evidence(strength=0, base=0),
    "gated": trueup.Evidence(),
    "closed": trueup.Evidence(least=0),
    "no gate": trueup.Evidence(budget=1, strength=0.1, base=0),
    "paper": trueup.Correction(lambda1=0.5, lambda2=0.5),
}
WITH_NORMS = [name for name in ALL if name not in ("vgg", "spellings")]


def calibrated(name, count=40):
    model = make(name)
    return model, trueup.calibrate(model, [images(count)], decide=False)


@pytest.mark.parametrize("name", WITH_NORMS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@torch.no_grad()
def test_the_answer_is_that_without_a_report_bit_for_bit(name, rule):
    model, targets = calibrated(name)
    x = images(4, seed=8)
    for report in (True, "all"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "correct: this rule corrects")
            output, found = trueup.correct(model, targets, rule, report=report)(x)
        assert output.equal(trueup.correct(model, targets, rule)(x))
        assert found.keys() == {"p", "gate", "evidence"}
        assert found["p"].shape == found["gate"].shape == (4,)
        assert ((found["p"] > 0) & (found["p"] <= 1)).all()


@pytest.mark.parametrize("name", WITH_NORMS)
@torch.no_grad()
def test_the_evidence_is_that_of_measure(name):
    model, targets = calibrated(name)
    x = images(6, seed=8) * 1.5
    robust = trueup.correct(model, targets, RULES["nothing"], report="all")
    shift = trueup.measure(model, targets, x, select=lambda site: site.kind == "norm")
    assert robust.report.norms == shift.norms
    torch.testing.assert_close(robust(x)[1]["evidence"], shift.evidence, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_p_is_the_rank_of_the_image_among_held_out_ones_at_the_first_norm():
    """By hand: half of the clean images describe, the others rank."""
    model, targets = calibrated("mobilenet", 80)
    robust = trueup.correct(model, targets, RULES["gated"], report=True)
    x = torch.cat([images(30, seed=3), images(30, seed=3) + 0.5 * torch.randn(30, 3, 32, 32)])
    p = robust(x)[1]["p"].double()
    assert robust.report.norms[0] == next(iter(targets.norms))
    target = targets.norms[robust.report.norms[0]]

    def statistics(moments):
        floor = 1e-3 * target.total / target.images
        logs = [0.5 * (moments[:, k] + floor[k]).log() for k in (2, 3)]
        return torch.cat([moments[:, 0], *logs], dim=1)

    kept = target.sample.double()
    clean = statistics(torch.cat([kept[:, :1], kept[:, 1:4].square()], dim=1))
    gate = trueup.functional.gate.fit(clean, targets.sampled)
    moments = trueup.functional.evidence.moments(model.stem[:2](x).double(), bands=True)
    torch.testing.assert_close(p, gate.p_values(statistics(moments)), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_the_gate_value_is_the_one_in_force():
    model, targets = calibrated("mobilenet", 80)
    x = torch.cat([images(5, seed=3), 3 * images(5, seed=4)])
    values = {name: trueup.correct(model, targets, rule, report=True)(x)[1]["gate"] for name, rule in RULES.items()}
    assert (values["nothing"] == 0).all()
    assert (values["no gate"] == 1).all()
    assert (values["paper"] == 1).all()
    seen = []
    robust = trueup.correct(model, targets, RULES["gated"])
    robust.combine.register_forward_hook(lambda _m, _i, out: seen.append(out))
    robust(x)
    assert values["gated"].equal(seen[0])


@torch.no_grad()
def test_an_image_that_is_not_finite_has_p_0_and_its_neighbours_keep_theirs():
    model, targets = calibrated("resnet")
    robust = trueup.correct(model, targets, RULES["gated"], report=True)
    x = images(3, seed=4)
    clean = robust(x)[1]["p"]
    x[1, 0, 3, 3] = torch.nan
    p = robust(x)[1]["p"]
    assert p[1] == 0
    assert p[[0, 2]].equal(clean[[0, 2]])


@pytest.mark.parametrize("rule", ["gated", "no gate"])
@torch.no_grad()
def test_copies_pickles_and_exports_report_alike(rule):
    model, targets = calibrated("resnet")
    robust, x = trueup.correct(model, targets, RULES[rule], report=True), images(4, seed=8)
    output, wanted = robust(x)
    any_batch = ({0: torch.export.Dim("images", min=2, max=64)},)
    exported = torch.export.export(robust, (x,), dynamic_shapes=any_batch).module()
    assert exported(images(7))[1]["p"].shape == (7,)
    for other in (copy.deepcopy(robust), pickle.loads(pickle.dumps(robust)), exported):
        again, found = other(x)
        torch.testing.assert_close(again, output)
        torch.testing.assert_close(found, wanted)
    assert robust.state_dict().keys() == model.state_dict().keys()


def test_in_training_mode_there_is_no_report():
    model, targets = calibrated("resnet")
    robust = trueup.correct(model, targets, RULES["gated"], report=True).train()
    output, found = robust(images(4))
    assert output.shape == (4, 10)
    assert found is None


def test_gradients_flow_through_the_answer_only():
    model, targets = calibrated("resnet")
    x = images(2, seed=8).requires_grad_()
    output, found = trueup.correct(model, targets, RULES["gated"], report=True)(x)
    output.sum().backward()
    assert x.grad.abs().sum() > 0
    assert not found["p"].requires_grad


def test_targets_that_cannot_tell_are_refused():
    model = make("vgg")  # has no norms
    with pytest.raises(ValueError, match="hold no norm of this model"):
        trueup.correct(model, trueup.calibrate(model, [images(20)], decide=False), trueup.Correction(), report=True)
    model, targets = calibrated("resnet", 5)
    with pytest.raises(ValueError, match="only 5 images"):
        trueup.correct(model, targets, RULES["gated"], report=True)
    with pytest.raises(ValueError, match="report='some': expected False, True or 'all'"):
        trueup.correct(model, targets, RULES["gated"], report="some")


def test_a_rule_that_corrects_before_the_first_norm_warns_that_p_values_are_not_exact():
    model, targets = calibrated("resnet")  # begins with a convolution and a ReLU
    with pytest.warns(UserWarning, match="corrects 'relu' before the first norm, 'layer1.0.bn1'") as said:
        trueup.correct(model, targets, RULES["paper"], report=True)
    assert [warning.filename for warning in said] == [__file__]
    trueup.correct(model, targets, RULES["paper"], report=True, select=lambda site: site.name.startswith("layer"))


def test_a_model_with_several_outputs_keeps_them():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x, flag: bool = True):
            y = self.bn(self.conv(x)).relu()
            return {"mean": y.mean(dim=(1, 2, 3)), "pair": (y, x)}

    model = Two().eval()
    targets = trueup.calibrate(model, [images(20)], decide=False)
    output, found = trueup.correct(model, targets, trueup.Evidence(depth=1), report=True)(images(3))
    assert output.keys() == {"mean", "pair"}
    assert found["p"].shape == (3,)
