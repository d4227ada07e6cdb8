"""Models in wrappers, and with habits of their own: handled, or refused with the way out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import trueup
from architectures import images, make

RULE = trueup.Evidence(budget=1, strength=0.2)


def net(conv=None):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3) if conv is None else conv
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


def ready(model):
    model(images(2))  # lets the lazy layer see its shape
    return model.eval()


def corrected(model):
    return trueup.correct(model, trueup.calibrate(model, [images(24)], decide=False), RULE)


@pytest.mark.parametrize(
    "parametrise", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight norm", "spectral norm"]
)
def test_parametrised_weights(parametrise):
    model = ready(net(parametrise(nn.Conv2d(3, 4, 3))))
    robust = corrected(model)
    assert not robust(images(2) - 1).isclose(model(images(2) - 1)).all()
    assert list(robust.state_dict()) == list(model.state_dict())
    assert parametrize.is_parametrized(model[0], "weight")


class Shadowing(nn.Module):
    """Keeps lists under the names of methods of `nn.Module`, as some public networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.modules = [self.conv, self.bn]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x))).mean((2, 3))


class ShadowingChecked(Shadowing):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 3
        return super().forward(x)


@pytest.mark.parametrize("kind", [Shadowing, ShadowingChecked])
def test_attributes_that_shadow_those_of_modules(kind):
    for model in (kind().eval(), nn.Sequential(kind()).eval()):
        robust = corrected(model)
        assert not robust(images(2) - 1).isclose(model(images(2) - 1)).all()


def test_a_compiled_submodule_is_corrected_inside():
    model = ready(net())
    model[0] = torch.compile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), backend="eager")
    found = [site.name for site in trueup.sites(model, images(2))]
    assert found == ["0._orig_mod.1", "1", "2"]
    robust = corrected(model)
    assert list(robust.state_dict()) == list(model.state_dict())
    assert not robust(images(2) - 1).isclose(model(images(2) - 1)).all()


def test_extra_state_in_the_state_dict():
    class Extra(nn.Module):
        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            pass

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = ready(nn.Sequential(*net(), Extra()))
    robust = corrected(model)
    assert robust.state_dict()["5._extra_state"] == {"version": 3}
    robust.load_state_dict(model.state_dict())


def test_half_precision():
    model = make("resnet").bfloat16()
    robust = trueup.correct(model, trueup.calibrate(model, [images(24).bfloat16()], decide=False), RULE)
    assert robust(images(2).bfloat16()).dtype == torch.bfloat16


def sharded():
    class FSDPModule:  # what fully_shard makes part of a model's class
        pass

    class Sharded(FSDPModule, nn.Linear):
        pass

    return Sharded(3, 3)


def naming(name, *, on):
    """A model in which an attribute, of itself or of a part, has the name of a method."""
    model = make("vgg")
    vars(model if on == "model" else next(m for m in model.modules() if isinstance(m, nn.Conv2d)))[name] = [1, 2]
    return model


class OnAMac(nn.Module):
    """Says that its parameters lie on Apple's GPU."""

    def parameters(self, recurse: bool = True):
        yield SimpleNamespace(is_meta=False, device=torch.device("mps:0"))


def test_an_attribute_that_hides_a_method_which_is_not_called_does_no_harm():
    model = naming("eval", on="part")
    trueup.calibrate(model, [images(2)], decide=False)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: torch.jit.trace(make("vgg"), images(1)), TypeError, "TorchScript.*give the Python module"),
        (lambda: make("vgg").to("meta"), ValueError, "meta device, which hold no values; load its weights first"),
        (OnAMac, ValueError, r"mps:0, .* without double precision; use model.to.'cpu'."),
        (sharded, TypeError, "before fully_shard"),
        (lambda: naming("parameters", on="model"), TypeError, "the model .Sequential. .* 'parameters', which hides"),
        (lambda: naming("children", on="part"), TypeError, "0 .Conv2d. .* 'children', .* rename the attribute"),
        (lambda: make("vgg").state_dict(), TypeError, "the model is a OrderedDict: expected a torch.nn.Module"),
    ],
    ids=["TorchScript", "meta", "MPS", "FSDP", "a model's name", "a part's name", "state_dict"],
)
def test_what_cannot_be_corrected_is_refused_with_the_way_out(model, error, message):
    with pytest.raises(error, match=message):
        trueup.calibrate(model(), [images(2)], decide=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_part_shares_its_weights():
    part = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    model = nn.Sequential(part, nn.BatchNorm2d(4), nn.ReLU()).eval()
    targets = trueup.calibrate(model, [images(8)], decide=False)
    robust = trueup.correct(model, targets, trueup.Evidence(budget=1, strength=0, base=0))
    assert {id(p) for p in robust.parameters()} == {id(p) for p in model.parameters()}
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert robust(images(2)).equal(model(images(2)))
