"""A value read at some sites, and a model that is run twice: `Reader`, and `Retrofit(blend=...)`."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import architectures
from architectures import images, make
from trueup.graph import Reader, Retrofit

WRITES = {
    "nothing": lambda self, x: x,
    "the input, by a method": lambda self, x: x.mul_(0.5),
    "the input, by an operator": lambda self, x: operator.iadd(x, 0.5),
    "a view of the input": lambda self, x: (x.flatten(1).mul_(0.5), x)[1],
    "a buffer": lambda self, x: (self.total.add_(x.mean()), x)[1],
    "a buffer that is read again": lambda self, x: (self.total.add_(x.mean()), x - self.total)[1],
    "a buffer, as out=": lambda self, x: (torch.add(self.total, x.mean(), out=self.total), x - self.total)[1],
}


class Overwriting(nn.Module):
    """Writes in place before and between its norms."""

    def __init__(self, write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.relu = write, nn.ReLU(inplace=True)
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2, self.bn3 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.write(self, x)
        y = self.relu(self.bn1(self.conv1(x)))
        z = self.relu(self.bn2(self.conv2(y)))
        return self.bn3(z) + y[..., 2:, 2:] + x[:, :1, 4:, 4:]


class _Mean(nn.Module):
    def __init__(self, site) -> None:
        super().__init__()
        self.site = site

    def forward(self, a: Tensor) -> Tensor:
        return a.mean((1, 2, 3))


class _Weighted(nn.Module):
    def forward(self, *seen: Tensor) -> Tensor:
        return sum(10**k * one for k, one in enumerate(seen))


class _Given(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, a: Tensor, value: Tensor) -> Tensor:
        self.value = value
        return a * self.scale


class _Both(nn.Module):
    """Keeps what it is given, and returns a mean of both."""

    def forward(self, own: Tensor, corrected: Tensor, *value: Tensor) -> Tensor:
        self.own, self.corrected, self.value = own, corrected, value
        return own * 0.25 + corrected * 0.75


class TestReader:
    """A value read at some sites, and given to everything placed, or to what blends two runs."""

    @pytest.mark.parametrize("twice", [True, False])
    @pytest.mark.parametrize("write", sorted(WRITES))
    def test_it_sees_what_the_model_has_there_and_what_it_overwrites_is_not_missed(self, write, twice):
        model, x = Overwriting(WRITES[write]).eval(), images(3) + 1
        seen: list[Tensor] = []
        for norm in (model.bn1, model.bn2):
            norm.register_forward_hook(lambda _m, _i, out: seen.append(out.detach().clone()))
        wanted = model(x.clone())
        value = seen[0].mean((1, 2, 3)) + 10 * seen[1].mean((1, 2, 3))
        for norm in (model.bn1, model.bn2):
            norm._forward_hooks.clear()
        model.total.zero_()
        given_x, reader = x.clone(), Reader(["bn1", "bn2"], _Mean, _Weighted())
        if twice:
            robust = Retrofit(model, lambda _: nn.Identity(), reader=reader, blend=_Both())
            assert robust.sites == ["bn1", "relu", "bn2", "relu#2", "bn3"]
        else:
            robust = Retrofit(model, lambda _: _Given(), reader=reader)
            assert robust.sites == ["bn2", "relu#2", "bn3"]
        out = robust(given_x)
        torch.testing.assert_close(out, wanted)
        for given in [robust.blend.value[0]] if twice else [module.value for module in robust.placed]:
            torch.testing.assert_close(given, value)
        # As the model itself leaves them, in one run.
        twin, left = Overwriting(WRITES[write]).eval(), x.clone()
        twin(left)
        assert given_x.equal(left)
        assert model.total.equal(twin.total)

    def test_a_shared_norm_is_read_where_it_is_called(self):
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.bn = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

            def forward(self, x: Tensor) -> Tensor:
                return self.bn(self.conv(self.bn(self.conv(x))))

        model, x = Twice().eval(), images(2)
        for site, wanted in (("bn", model.bn(model.conv(x))), ("bn#2", model(x))):
            robust = Retrofit(model, lambda _: nn.Identity(), reader=Reader([site], _Mean, _Weighted()), blend=_Both())
            robust(x)
            torch.testing.assert_close(robust.blend.value[0], wanted.mean((1, 2, 3)))

    def test_a_site_that_is_not_there_is_named(self):
        with pytest.raises(
            ValueError, match="'nowhere' is to be read, and was not found in this MobileNet; it has stem.1"
        ):
            Retrofit(make("mobilenet"), lambda _: None, reader=Reader(["nowhere"], _Mean, _Weighted()))


class _Scale(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a * 3


class TestBlend:
    """The model run as it is, and with what is placed, and one output of both."""

    @pytest.mark.parametrize("name", architectures.ALL)
    def test_it_is_given_what_the_model_says_and_what_a_retrofitted_one_does(self, name):
        model, x = make(name), images(3)
        robust = Retrofit(model, lambda _: _Scale(), blend=_Both())
        own, corrected = model(x), Retrofit(model, lambda _: _Scale())(x)
        assert not own.equal(corrected)
        assert robust(x).equal(own * 0.25 + corrected * 0.75)
        assert robust.blend.own.equal(own)
        assert robust.blend.value == ()

    def test_what_is_placed_does_not_change_what_is_read(self):
        model, x = make("mobilenet"), images(3)
        values = []
        for placed in (nn.Identity(), _Scale()):
            reader = Reader(["stem.1", "blocks.0.conv.1.1"], _Mean, _Weighted())
            robust = Retrofit(model, lambda _, placed=placed: placed, reader=reader, blend=_Both())
            robust(x)
            values.append(robust.blend.value[0])
        assert values[0].equal(values[1])

    @pytest.mark.parametrize("how", ["dictionary", "arguments", "keywords"])
    def test_inputs_of_any_structure_are_overwritten_once(self, how):
        class Halves(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)

            def half(self, x: Tensor) -> Tensor:
                return F.relu(self.conv(x.mul_(0.5)))

        class Dictionary(Halves):
            def forward(self, batch: dict[str, Tensor]) -> Tensor:
                return self.half(batch["x"])

        class Arguments(Halves):
            def forward(self, *given: Tensor) -> Tensor:
                return self.half(given[0])

        class Keywords(Halves):
            def forward(self, **given: Tensor) -> Tensor:
                return self.half(given["x"])

        def call(network: nn.Module, x: Tensor) -> Tensor:
            return network({"x": x}) if how == "dictionary" else network(x) if how == "arguments" else network(x=x)

        model = {"dictionary": Dictionary, "arguments": Arguments, "keywords": Keywords}[how]().eval()
        x, robust = images(2), Retrofit(model, lambda _: _Scale(), blend=_Both())
        wanted, given = call(model, x.clone()), x.clone()
        call(robust, given)
        torch.testing.assert_close(robust.blend.own, wanted)
        torch.testing.assert_close(robust.blend.corrected, 3 * wanted)
        torch.testing.assert_close(given, x / 2)

    def test_outputs_of_any_structure(self):
        class Many(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)

            def forward(self, x: Tensor) -> dict[str, object]:
                y = F.relu(self.conv(x))
                return {"maps": [y, y.mean((1, 2, 3))], "given": x, "class": y.mean((2, 3)).argmax(1), "size": 3}

        class Pair(nn.Module):
            def forward(self, own: object, corrected: object) -> tuple[object, object]:
                return own, corrected

        model, x = Many().eval(), images(2)
        own, corrected = Retrofit(model, lambda _: _Scale(), blend=Pair())(x)
        wanted = model(x)
        assert own["maps"][0].equal(wanted["maps"][0])
        assert corrected["maps"][0].equal(3 * wanted["maps"][0])
        assert own["given"].equal(x)
        assert corrected["size"] == 3
