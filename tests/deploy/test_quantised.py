"""Quantised models: corrected first and then quantised, or the other way round where that can work."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import trueup
from architectures import images, make
from trueup.targets import Fingerprint, is_quantised

RULE = trueup.Evidence(budget=1, strength=0.5, base=0.2)


@pytest.fixture(scope="module")
def torchao():
    """torchao's quantisation; its import says things about other versions of torch."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.quantization as found
        import torchao.quantization.pt2e.quantize_pt2e
        import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401
    return found


@pytest.fixture(scope="module")
def calibrated():
    model = make("resnet")
    return model, trueup.calibrate(model, images(48).split(16), decide=False)


def configs(torchao):
    return [torchao.Int8WeightOnlyConfig(version=2), torchao.Int8DynamicActivationInt8WeightConfig(version=2)]


def quantised(torchao, module, config):
    module = copy.deepcopy(module)
    torchao.quantize_(module, config)
    return module


def shifted():
    return images(8, seed=5) * 0.3 - 2


def close(found: Tensor, wanted: Tensor, uncorrected: Tensor, share: float = 0.25) -> bool:
    """Whether an answer is far closer to the corrected model's than the uncorrected one is."""
    return bool((found - wanted).norm() < share * (uncorrected - wanted).norm())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", [0, 1], ids=["weights", "dynamic"])
def test_either_order_gives_the_corrected_models_answers(torchao, calibrated, which):
    model, targets = calibrated
    config = configs(torchao)[which]
    with torch.no_grad():
        robust = trueup.correct(model, targets, RULE)
        wanted, uncorrected = robust(shifted()), model(shifted())
        assert close(quantised(torchao, robust, config)(shifted()), wanted, uncorrected)
        after = trueup.correct(quantised(torchao, model, config), targets, RULE)
        assert close(after(shifted()), wanted, uncorrected)
        assert is_quantised(after)


@pytest.mark.filterwarnings("ignore")
def test_static_quantisation_of_a_corrected_model(torchao, calibrated):
    pt2e = torchao.pt2e
    x86 = pt2e.quantizer.x86_inductor_quantizer
    model, targets = calibrated
    robust = trueup.correct(model, targets, RULE)
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = pt2e.quantize_pt2e.prepare_pt2e(torch.export.export(robust, (shifted(),)).module(), quantizer)
    with torch.no_grad():
        prepared(shifted())
        converted = pt2e.quantize_pt2e.convert_pt2e(prepared)
        assert "quantize_per_" in converted.code
        assert close(converted(shifted()), robust(shifted()), model(shifted()), 0.8)
    with pytest.raises(ValueError, match="this model is quantised, so correct first: quantise what trueup.correct"):
        trueup.correct(converted, targets, RULE)


@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_norms_were_fused_away_is_told_to_correct_first(torchao):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 10)

        def forward(self, x):
            return self.fc(self.bn(self.conv(x)).mean((2, 3)))

    model = Small().eval()
    targets = trueup.calibrate(model, images(24).split(8), decide=False)
    fused = copy.deepcopy(model)
    fused.conv, fused.bn = torch.nn.utils.fuse_conv_bn_eval(fused.conv, fused.bn), nn.Identity()
    torchao.quantize_(fused, torchao.Int8WeightOnlyConfig(version=2))
    with pytest.raises(ValueError, match="so correct first"):
        trueup.correct(fused, targets, RULE)


def test_a_fingerprint_ignores_extra_state_and_other_things_that_are_no_tensors():
    class Stateful(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    stateful = Stateful(4, 4)
    stateful.load_state_dict({**plain.state_dict(), "_extra_state": {}})
    assert Fingerprint.of(stateful).difference(Fingerprint.of(plain)) == ""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_fingerprint_reads_quantised_weights_and_still_tells_models_apart():
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    rounded = copy.deepcopy(first).state_dict()
    rounded["weight"] = torch.quantize_per_tensor(rounded["weight"], 0.001, 0, torch.qint8)

    class Holder(nn.Module):
        def state_dict(self, *_, **__):
            return rounded

    assert Fingerprint.of(Holder()).difference(Fingerprint.of(first)) == ""
    assert "'weight' has other values" in Fingerprint.of(Holder()).difference(Fingerprint.of(second))
