"""A value read at some sites, and given to what is placed after them: `Reading`."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, nn

from architectures import images, make
from trueup.graph import Instrumented, Reading, trace

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
    """Keeps the value that it is given."""

    def forward(self, a: Tensor, value: Tensor) -> Tensor:
        self.value = value
        return a


class TestReading:
    @pytest.mark.parametrize("write", sorted(WRITES))
    def test_it_sees_what_the_model_has_there_and_what_it_overwrites_is_not_missed(self, write):
        model, x = Overwriting(WRITES[write]).eval(), images(3) + 1
        seen: list[Tensor] = []
        for norm in (model.bn1, model.bn2):
            norm.register_forward_hook(lambda _m, _i, out: seen.append(out.detach().clone()))
        wanted = model(x.clone())
        value = seen[0].mean((1, 2, 3)) + 10 * seen[1].mean((1, 2, 3))
        for norm in (model.bn1, model.bn2):
            norm._forward_hooks.clear()
        model.total.zero_()
        given_x, reading = x.clone(), Reading(["bn1", "bn2"], _Mean, _Weighted())
        robust = Instrumented(trace(model), lambda _: _Given(), reading=reading)
        assert robust.placed_at == ["bn2", "relu#2", "bn3"]
        out = robust(given_x)
        torch.testing.assert_close(out, wanted)
        for module in robust.placed:
            torch.testing.assert_close(module.value, value)
        # As the model itself leaves them, in one run.
        twin, left = Overwriting(WRITES[write]).eval(), x.clone()
        twin(left)
        assert given_x.equal(left)
        assert model.total.equal(twin.total)

    def test_sites_may_be_named_in_any_order(self):
        model, x = make("mobilenet"), images(2)
        names = [site.name for site in trace(model).sites if site.kind == "norm"][:2]
        for order in (names, names[::-1]):
            alone = []
            for name in order:
                robust = Instrumented(trace(model), lambda _: _Given(), reading=Reading([name], _Mean, _Weighted()))
                robust(x)
                alone.append(robust.placed[0].value)
            robust = Instrumented(trace(model), lambda _: _Given(), reading=Reading(order, _Mean, _Weighted()))
            torch.testing.assert_close(robust(x), model(x))
            torch.testing.assert_close(robust.placed[0].value, alone[0] + 10 * alone[1])

    def test_a_shared_norm_is_read_where_it_is_called(self):
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.bn = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

            def forward(self, x: Tensor) -> Tensor:
                return self.bn(self.conv(self.bn(self.conv(x))))

        model, x = Twice().eval(), images(2)
        for site, wanted in (("bn", model.bn(model.conv(x))), ("bn#2", model(x))):
            robust = Instrumented(trace(model), lambda _: _Given(), reading=Reading([site], _Mean, _Weighted()))
            robust(x)
            assert robust.placed_at[0] == site
            torch.testing.assert_close(robust.placed[0].value, wanted.mean((1, 2, 3)))

    def test_a_site_that_is_not_there_is_named(self):
        with pytest.raises(
            ValueError, match="gate reads the site 'nowhere', which was not found in this MobileNet; it has stem.1"
        ):
            Instrumented(trace(make("mobilenet")), lambda _: None, reading=Reading(["nowhere"], _Mean, _Weighted()))
        with pytest.raises(ValueError, match="the report reads the site 'nowhere'"):
            Instrumented(trace(make("mobilenet")), lambda _: None, report=Reading(["nowhere"], _Mean, _Weighted()))
