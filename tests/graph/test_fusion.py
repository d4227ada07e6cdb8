"""The sum and the relu after a norm in one pass with what is placed there: where nothing can tell, and nowhere else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from architectures import images, make
from one_pass import (
    BOTH,
    FIRST,
    INTO,
    LAST,
    LEAST,
    NOTHING,
    SHUT,
    Block,
    apart,
    calibrated,
    corrected,
    dark,
    every,
    iadd,
    iadd_to_the_other,
    norm_is_read,
    residual_is_overwritten,
    sum_is_read,
)
from trueup.graph import Reader, Instrumented


def absorbed(robust, x):
    """For each site, what the module placed there does of what follows it; for a sum, in which order."""
    seen = {}

    def note(name):
        return lambda _m, _i, options, _o: seen.update(
            {name: (*([options["order"]] if "residual" in options else []), *filter(None, [options.get("activation")]))}
        )

    hooks = [
        module.register_forward_hook(note(name), with_kwargs=True)
        for name, module in zip(robust.sites, robust.placed, strict=True)
    ]
    robust(x)
    for hook in hooks:
        hook.remove()
    return seen


class Loud(nn.ReLU):
    """Something that a plain relu is not."""

    def forward(self, x):
        return super().forward(x) * 2


def residual_first(self, y, x):
    before = self.other(x)
    return F.relu(before + y)


def sum_is_read_after_a_relu_in_place(self, y, x):
    z = y + self.other(x)
    return z.relu_() + z


def relu_and_norm_are_read(self, y, x):
    return F.relu(y) + y


def twice_a_relu(self, y, x):
    return self.relu(y) - self.relu(-y)


def sum_with_itself(self, y, x):
    return F.relu(y + y)


FOLLOWS = {
    "relu": (lambda self, y, x: self.relu(y), None, ("relu",)),
    "relu, in place": (lambda self, y, x: self.relu(y), nn.ReLU(inplace=True), ("relu",)),
    "function": (lambda self, y, x: F.relu(y), None, ("relu",)),
    "function, in place": (lambda self, y, x: F.relu(y, inplace=True), None, ("relu",)),
    "method": (lambda self, y, x: y.relu(), None, ("relu",)),
    "method, in place": (lambda self, y, x: y.relu_(), None, ("relu",)),
    "relu, and relu again": (lambda self, y, x: F.relu(self.relu(y) - 0.1), None, ("relu",)),
    "sum": (lambda self, y, x: y + self.other(x), None, (FIRST,)),
    "sum, then another activation": (lambda self, y, x: F.gelu(y + self.other(x)), None, (FIRST,)),
    "sum and relu": (lambda self, y, x: self.relu(y + self.other(x)), None, (FIRST, "relu")),
    "sum and relu, in place": (lambda self, y, x: (y + self.other(x)).relu_(), None, (FIRST, "relu")),
    "residual first": (residual_first, None, (LAST, "relu")),
    "sum in place": (iadd, nn.ReLU(inplace=True), (INTO, "relu")),
    "torch.add": (lambda self, y, x: torch.add(y, self.other(x)).relu(), None, (FIRST, "relu")),
    "method add": (lambda self, y, x: self.other(x).add(y).relu(), None, (LAST, "relu")),
    "method add_": (lambda self, y, x: y.add_(self.other(x)).relu_(), None, (INTO, "relu")),
    "sum of three": (lambda self, y, x: (y + self.other(x) + x[:, :1, 2:, 2:]).relu(), None, (FIRST,)),
    "sum of three, the norm last": (lambda self, y, x: (self.other(x) + 1 + y).relu(), None, (LAST, "relu")),
    "a sum that is read": (sum_is_read, None, (FIRST,)),
    "a sum that is read after a relu in place": (sum_is_read_after_a_relu_in_place, None, (FIRST,)),
    "a residual that is overwritten": (residual_is_overwritten, None, (FIRST, "relu")),
    "a residual to be broadcast": (lambda self, y, x: F.relu(y + x[:, :1, 2:, 2:]), None, (FIRST, "relu")),
    "the same for all images": (lambda self, y, x: F.relu(y + self.bias), None, ()),
    "one that makes more of it": (
        lambda self, y, x: F.relu(y + x.new_ones(2, 1, 1, 1, 1)).sum(0),
        None,
        (FIRST, "relu"),
    ),
    "one in double precision": (lambda self, y, x: F.relu(y + self.other(x).double()).float(), None, (FIRST, "relu")),
    "in place, one in double": (lambda self, y, x: y.add_(self.other(x).double()).relu_(), None, (INTO, "relu")),
    "one in another layout": (
        lambda self, y, x: F.relu(self.other(x).to(memory_format=torch.channels_last) + y),
        None,
        (LAST, "relu"),
    ),
    "a number": (lambda self, y, x: F.relu(y + x.shape[1]), None, (FIRST, "relu")),
    "a number that is known": (lambda self, y, x: F.relu(y + 0.5), None, ()),
    "a sum with itself": (sum_with_itself, None, ()),
    "alpha": (lambda self, y, x: torch.add(y, self.other(x), alpha=0.5).relu(), None, ()),
    "in place into the other": (iadd_to_the_other, None, ()),
    "method add_ into the other": (lambda self, y, x: self.other(x).add_(y).relu_(), None, ()),
    "a norm that is read": (norm_is_read, None, ()),
    "a norm that is read beside its relu": (relu_and_norm_are_read, None, ()),
    "a norm with two relus": (twice_a_relu, None, ()),
    "a difference": (lambda self, y, x: F.relu(y - self.other(x)), None, ()),
    "a subclass": (lambda self, y, x: self.relu(y), Loud(), ()),
    "another activation": (lambda self, y, x: self.relu(y), nn.ReLU6(), ()),
    "a view in between": (lambda self, y, x: y.flatten(2).relu().view(y.shape), None, ()),
}


@every
@pytest.mark.parametrize(("follow", "relu", "wanted"), FOLLOWS.values(), ids=FOLLOWS.keys())
def test_what_follows_is_done_in_the_same_pass_and_nothing_changes(follow, relu, wanted, rule):
    model = Block(follow, relu).eval()
    robust = corrected(model, rule)
    x = torch.cat([images(4), dark(4)])
    assert absorbed(robust, x) == {"bn": wanted}
    once_more = apart(robust)
    assert absorbed(once_more, x) == {"bn": ()}
    out = robust(x)
    assert out.equal(once_more(x))
    assert out.stride() == once_more(x).stride()
    assert out.equal(model(x)) == (rule is NOTHING)
    twin = copy.deepcopy(robust)
    assert absorbed(twin, x) == {"bn": wanted}
    assert twin(x).equal(out)
    torch.testing.assert_close(torch.cat([robust(image[None]) for image in x]), out, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("follow", [iadd, residual_first])
def test_in_another_precision(follow, dtype):
    model = Block(follow).eval()
    targets = calibrated(model)
    for rule in (BOTH, SHUT):
        robust, x = trueup.correct(copy.deepcopy(model).to(dtype), targets, rule), dark().to(dtype)
        assert len(absorbed(robust, x)["bn"]) == 2
        assert robust(x).equal(apart(robust)(x))


def test_in_place_and_in_mixed_precision_the_sum_is_as_narrow_as_the_models():
    model = Block(lambda self, y, x: iadd(self, y, x.float()[:, :1, 2:, 2:].repeat(1, 4, 1, 1))).eval()
    model.other = nn.Identity()
    targets = calibrated(model)
    robust = trueup.correct(model.bfloat16(), targets, BOTH)
    x = dark().bfloat16()
    assert absorbed(robust, x) == {"bn": (INTO, "relu")}
    assert robust(x).equal(apart(robust)(x))


class Tokens(nn.Module):
    """A norm over the last dimension, and a residual around it, or a bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 6, 4, stride=4), nn.LayerNorm(6)
        self.bias = nn.Parameter(torch.randn(6)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).permute(0, 2, 3, 1)
        return F.relu(self.norm(x) + (x if self.bias is None else self.bias))


@every
@pytest.mark.parametrize("bias", [False, True])
def test_channels_may_be_last(bias, rule):
    model = Tokens(bias).eval()
    robust, x = corrected(model, rule), dark()
    assert absorbed(robust, x) == {"norm": () if bias else (FIRST, "relu")}
    assert robust(x).equal(apart(robust)(x))
    assert robust(x).stride() == model(x).stride()


def out_plus(out, identity):
    return out + identity


def plus_out(out, identity):
    return identity + out


def out_in_place(out, identity):
    out += identity
    return out


def identity_in_place(out, identity):
    identity += out
    return identity


class Downsampling(nn.Module):
    """A residual block whose two branches end in a norm, as torchvision writes it."""

    def __init__(self, add) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.downsample = nn.Sequential(nn.Conv2d(3, 8, 1, stride=2), nn.BatchNorm2d(8))
        self.relu, self.add, self.fc = nn.ReLU(inplace=True), add, nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = self.add(out, self.downsample(x))
        return self.fc(self.relu(out).mean((2, 3)))


@every
@pytest.mark.parametrize(
    ("add", "taker", "order"),
    [
        (out_plus, "bn2", FIRST),
        (plus_out, "bn2", LAST),
        (out_in_place, "bn2", INTO),
        (identity_in_place, "downsample.1", INTO),
    ],
)
def test_of_two_norms_that_are_added_one_does_it(add, taker, order, rule):
    model = Downsampling(add).eval()
    robust = corrected(model, rule)
    x = torch.cat([images(4), dark(4)])
    wanted = {"bn1": ("relu",), "bn2": (), "downsample.1": (), taker: (order, "relu")}
    assert absorbed(robust, x) == {name: wanted[name] for name in robust.sites}
    assert taker in robust.sites
    assert robust(x).equal(apart(robust)(x))
    if rule is SHUT:
        shut = corrected(model, trueup.Evidence(1e-6, least=0))
        assert absorbed(shut, x)[taker] == (order, "relu")
        assert shut(x).equal(model(x))


@every
@pytest.mark.parametrize("name", ["mobilenet", "densenet", "convnext", "vit", "resnet"])
def test_on_every_architecture_nothing_changes(name, rule):
    model = make(name)
    robust = corrected(model, rule)
    x = torch.cat([images(4), dark(4)])
    assert any(absorbed(robust, x).values()) == (name not in ("convnext", "vit"))
    assert robust(x).equal(apart(robust)(x))
    twin = pickle.loads(pickle.dumps(robust))
    assert absorbed(twin, x) == absorbed(robust, x)
    assert twin(x).equal(robust(x))
    torch.manual_seed(5)
    trained = robust.train()(x)
    torch.manual_seed(5)
    assert trained.equal(apart(robust).train()(x))


@every
def test_gradients_are_the_same(rule):
    model = Downsampling(out_in_place).eval()
    robust = corrected(model, rule)
    found = []
    for module in (robust, apart(robust)):
        x = torch.cat([images(4), dark(4)]).requires_grad_()
        weights = list(module.model.parameters())
        found.append(torch.autograd.grad(module(x).square().sum(), [x, *weights]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# The gate's, where the compiler chooses how its features lie.
@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.parametrize("rule", [BOTH, SHUT, LEAST], ids=["both", "shut", "least"])
def test_compiled_and_exported(rule):
    model = Downsampling(out_in_place).eval()
    robust = corrected(model, rule)
    x = torch.cat([images(4), dark(4)])
    wanted = robust(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(robust, fullgraph=True)(x), wanted, atol=1e-4, rtol=1e-4)
    exported = torch.export.export(robust, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    torch.testing.assert_close(exported(x[:5]), wanted[:5], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_still_run(register, inplace):
    model = Block(lambda self, y, x: self.relu(y), nn.ReLU(inplace)).eval()
    targets, calls = calibrated(model), []
    getattr(model.bn, register)(lambda *_: calls.append("bn"))
    robust, x = trueup.correct(model, targets, BOTH), dark()
    assert absorbed(robust, x) == {"bn": ("relu",)}
    assert calls == ["bn"]
    calls.clear()
    getattr(model.relu, register)(lambda *_: calls.append("relu"))
    robust = trueup.correct(model, targets, BOTH)
    assert absorbed(robust, x) == {"bn": ()}
    assert calls == ["bn", "relu"]


class _Able(nn.Module):
    """Says what it was given."""

    absorbs = ("add", "relu")

    def forward(self, a: Tensor, *given: Tensor, **options: object) -> Tensor:
        self.given, self.options = given, sorted(options)
        a = a if "residual" not in options else a + options["residual"]
        return a.relu() if options.get("activation") else a


@pytest.mark.parametrize(
    ("able", "wanted"),
    [
        (("add", "relu"), ["activation", "order", "residual"]),
        (("add",), ["order", "residual"]),
        (("relu",), []),
        ((), []),
    ],
)
def test_a_module_is_given_only_what_it_offers_to_do(able, wanted):
    class Some(_Able):
        absorbs = able

    model, x = Block(residual_first).eval(), images(2)
    robust = Instrumented(model, lambda site: Some() if site.kind == "norm" else None)
    assert robust(x).equal(model(x))
    assert robust.placed[0].options == wanted


def test_what_has_something_placed_itself_stays():
    model, x = Block(residual_first).eval(), images(2)
    robust = Instrumented(model, lambda _: _Able())
    assert robust.sites == ["bn", "relu"]
    assert robust(x).equal(model(x))
    assert [module.options for module in robust.placed] == [["order", "residual"], ["activation"]]


def test_what_is_read_is_what_the_norm_gave():
    class Mean(nn.Module):
        def __init__(self, site) -> None:
            super().__init__()

        def forward(self, a: Tensor) -> Tensor:
            return a.mean((1, 2, 3))

    model, x = Block(iadd, nn.ReLU(inplace=True)).eval(), images(2)
    robust = Instrumented(
        model, lambda _: _Able(), reader=Reader(["bn"], Mean, nn.Identity()), select=lambda s: s.name == "bn"
    )
    assert robust(x).equal(model(x))
    assert robust.placed[0].options == ["activation", "order", "residual"]
    torch.testing.assert_close(robust.placed[0].given[0], model.bn(model.conv(x)).mean((1, 2, 3)))


def test_where_other_names_read_what_is_written_nothing_is_absorbed():
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            y = self.relu(x)
            return (y + 1) + x

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.relu(x) + x

    for model in (Aliased().eval(), Sum().eval()):
        x, robust = images(2), Instrumented(model, lambda _: _Able())
        assert robust(x).equal(model(x))
        assert robust.placed[0].options == []
