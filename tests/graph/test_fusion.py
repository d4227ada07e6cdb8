"""A norm, a sum and a ReLU done together with what is placed there: where nothing can tell, and nowhere else."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from architectures import images, make
from graph.chains import (
    CHAINS,
    FIRST,
    INTO,
    LAST,
    Block,
    Change,
    Downsampling,
    Shared,
    Tokens,
    apart,
    dark,
    iadd,
    instrumented,
    residual_first,
    tasks,
)
from trueup.graph import Instrumented, Reading, trace

EVERYONE = trueup.Evidence(budget=1, strength=0.2)
GATED = trueup.Evidence(budget=0.05, strength=0.2, least=0.2)
SHUT = trueup.Evidence(budget=0.05, strength=0.2, least=0)
LEFT_ALONE = trueup.Evidence(strength=0, base=0)
PAPER = trueup.Correction(1, 0.2)
SORT = trueup.Correction(1, 0.2, method="sort")
RULES = {"everyone": EVERYONE, "gated": GATED, "shut": SHUT, "nothing": LEFT_ALONE, "paper": PAPER}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def corrected(model, rule, images_=None):
    targets = trueup.calibrate(model, [images(24)] if images_ is None else [images_], decide=False)
    return trueup.correct(model, targets, rule)


def without_norm(found):
    return tuple(task for task in found if task != "norm")


@pytest.mark.parametrize(("follow", "relu", "after_norm", "_"), CHAINS.values(), ids=CHAINS.keys())
def test_what_follows_a_norm_is_done_with_its_correction(follow, relu, after_norm, _):
    model, x = Block(follow, relu), dark(4)
    robust = instrumented(model, "norm")
    found = tasks(robust, x)
    assert {name: without_norm(told) for name, told in found.items()} == {"bn": after_norm}
    assert tasks(apart(robust), x) == {"bn": ()}
    with torch.no_grad():
        assert robust(x).equal(apart(robust)(x))
        assert not robust(x).equal(model(x))
    assert tasks(copy.deepcopy(robust), x) == found


@pytest.mark.parametrize(("follow", "relu", "_", "before_relu"), CHAINS.values(), ids=CHAINS.keys())
def test_what_leads_to_a_relu_is_done_with_its_correction(follow, relu, _, before_relu):
    model, x = Block(follow, relu), dark(4)
    robust = instrumented(model, "activation")
    assert list(tasks(robust, x).values()) == before_relu
    with torch.no_grad():
        assert robust(x).equal(apart(robust)(x))
        assert robust(x).equal(model(x)) == (not before_relu)


@pytest.mark.parametrize(("follow", "relu", "after_norm", "before_relu"), CHAINS.values(), ids=CHAINS.keys())
def test_both_rules_give_the_same_bits_as_with_everything_apart(follow, relu, after_norm, before_relu):
    """The layouts, precisions and shapes of residuals, through the kernels."""
    model, x = Block(follow, relu), torch.cat([images(2), dark(2)])
    targets = trueup.calibrate(model, [images(12)], decide=False)
    with torch.no_grad():
        for rule in (EVERYONE, PAPER) if before_relu else (EVERYONE,):
            robust = trueup.correct(model, targets, rule)
            out, twin = robust(x), apart(robust)
            assert out.equal(twin(x))
            assert out.stride() == twin(x).stride()
            assert not out.equal(model(x))
            torch.testing.assert_close(robust(x[1:2]), out[1:2], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("follow", ["sum and relu", "sum in place", "relu"])
def test_an_exact_sort_does_nothing_of_its_neighbours_work(follow):
    assert list(tasks(corrected(Block(*CHAINS[follow][:2]), SORT)).values()) == [()]


@pytest.mark.parametrize("name", ["mobilenet", "densenet", "convnext", "vit", "resnet"])
@rules
def test_on_every_architecture_nothing_changes(name, rule):
    model = make(name)
    robust = corrected(model, rule)
    x = torch.cat([images(4), dark(4)])
    fuses = name in ("densenet", "resnet") or rule is not PAPER
    assert any("norm" in told for told in tasks(robust, x).values()) == (fuses and rule is not LEFT_ALONE)
    twin = pickle.loads(pickle.dumps(robust))
    assert tasks(twin, x) == tasks(robust, x)
    with torch.no_grad():
        assert robust(x).equal(apart(robust)(x))
        assert twin(x).equal(robust(x))
    torch.manual_seed(5)
    trained = robust.train()(x)
    torch.manual_seed(5)
    assert trained.equal(apart(robust).train()(x))


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


@pytest.mark.parametrize(
    ("add", "taker", "order"),
    [
        (out_plus, "bn2", FIRST),
        (plus_out, "bn2", LAST),
        (out_in_place, "bn2", INTO),
        (identity_in_place, "downsample.1", INTO),
    ],
)
def test_of_two_norms_that_are_added_one_does_it(add, taker, order):
    model, x = Downsampling(add), torch.cat([images(4), dark(4)])
    targets = trueup.calibrate(model, [images(24)], decide=False)
    for rule in (EVERYONE, GATED, SHUT):
        robust = trueup.correct(model, targets, rule)
        wanted = {"bn1": ("relu",), "bn2": (), "downsample.1": (), taker: (order, "relu")}
        found = {name: without_norm(told) for name, told in tasks(robust, x).items()}
        assert found == {name: wanted[name] for name in robust.placed_at}
        assert taker in robust.placed_at
        with torch.no_grad():
            assert robust(x).equal(apart(robust)(x))
    shut = trueup.correct(model, targets, trueup.Evidence(1e-6, least=0))
    assert without_norm(tasks(shut, x)[taker]) == (order, "relu")
    assert shut(x).equal(model(x))


@pytest.mark.parametrize("rule", [EVERYONE, SHUT, PAPER], ids=["everyone", "shut", "paper"])
def test_gradients_are_the_same(rule):
    robust = corrected(Downsampling(out_in_place), rule)
    found = []
    for module in (robust, apart(robust)):
        x = torch.cat([images(4), dark(4)]).requires_grad_()
        weights = list(module.model.parameters())
        found.append(torch.autograd.grad(module(x).square().sum(), [x, *weights]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert any(gradient.any() for gradient in found[0])


@pytest.mark.parametrize("rule", [EVERYONE, PAPER], ids=["everyone", "paper"])
def test_a_chain_compiles_and_exports(rule):
    robust, x = corrected(Block(iadd), rule), torch.cat([images(4), dark(4)])
    with torch.no_grad():
        wanted = robust(x)
        torch._dynamo.reset()
        compiled = torch.compile(robust, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), wanted, atol=1e-4, rtol=1e-4)
        exported = torch.export.export(robust, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
        if rule is PAPER:  # exported, it sorts
            wanted = corrected(Block(iadd), replace(rule, method="sort"))(x)
        torch.testing.assert_close(exported(x[:5]), wanted[:5], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("follow", [iadd, residual_first])
def test_in_another_precision(follow, dtype):
    model = Block(follow)
    targets = trueup.calibrate(model, [images(24)], decide=False)
    for rule in (EVERYONE, SHUT, PAPER):
        robust, x = trueup.correct(copy.deepcopy(model).to(dtype), targets, rule), dark().to(dtype)
        assert len(without_norm(next(iter(tasks(robust, x).values())))) == 2
        with torch.no_grad():
            assert robust(x).equal(apart(robust)(x))


def test_in_place_and_in_mixed_precision_the_sum_is_as_narrow_as_the_models():
    model = Block(lambda self, y, x: iadd(self, y, x.float()[:, :1, 2:, 2:].repeat(1, 4, 1, 1)))
    model.other = nn.Identity()
    targets = trueup.calibrate(model, [images(24)], decide=False)
    robust, x = trueup.correct(model.bfloat16(), targets, EVERYONE), dark().bfloat16()
    assert without_norm(tasks(robust, x)["bn"]) == (INTO, "relu")
    assert robust(x).equal(apart(robust)(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rule", [EVERYONE, GATED, LEFT_ALONE], ids=["everyone", "gated", "nothing"])
def test_channels_may_be_last(bias, rule):
    model = Tokens(bias)
    robust, x = corrected(model, rule), dark()
    told = [without_norm(each) for each in tasks(robust, x).values()]
    assert told == [() if bias else (FIRST, "relu")] * len(robust.sites)
    assert robust(x).equal(apart(robust)(x))
    assert robust(x).stride() == model(x).stride()


def test_vectors_have_channels_too():
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.relu = nn.Conv2d(3, 16, 3), nn.BatchNorm1d(16), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.bn(self.conv(x).mean((2, 3))))

    robust = corrected(Tail().eval(), PAPER)
    assert tasks(robust) == {"relu": ("norm", "relu")}
    assert robust(dark()).equal(apart(robust)(dark()))


def overwritten(look):
    """The norm's input is overwritten before the sum, under another name."""

    def how(self, y):
        z = self.bn(look(y))
        y.mul_(2)
        return z + y

    return how


def overwritten_by_out(self, y):
    z, more = self.bn(torch.squeeze(y)), y + 1
    torch.mul(y, 2, out=y)
    return z + more


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        pytest.param(lambda self, y: self.bn(y), True, id="plain"),
        pytest.param(lambda self, y: self.bn(input=y), False, id="by name"),
        pytest.param(lambda self, y: self.bn(y) + y, True, id="read"),
        pytest.param(lambda self, y: (self.bn(y), y.mul_(2))[0] + y, False, id="overwritten"),
        pytest.param(lambda self, y: self.bn(y.flatten(2).unflatten(2, (30, 30))), True, id="a view"),
        pytest.param(lambda self, y: self.bn(y.relu_()), True, id="in place"),
        pytest.param(lambda self, y: self.bn(y) * self.bn.weight[:, None, None], True, id="weight is read"),
        pytest.param(overwritten(torch.squeeze), False, id="overwritten view"),
        pytest.param(overwritten(torch.relu_), False, id="overwritten, in place"),
        pytest.param(overwritten(lambda y: y.mT), False, id="overwritten attribute"),
        pytest.param(overwritten(lambda y: F.dropout3d(y, training=False)), False, id="overwritten, not dropped"),
        pytest.param(overwritten_by_out, False, id="overwritten by out="),
    ],
)
def test_a_batch_norm_is_done_together_only_if_nothing_can_overwrite_its_input(how, wanted):
    robust = instrumented(Shared(how), "norm")
    assert ("norm" in tasks(robust)["bn"]) == wanted
    with torch.no_grad():
        assert robust(dark()).equal(apart(robust)(dark()))


def test_a_batch_norm_that_the_gate_reads_is_the_models_own():
    model = make("resnet")
    targets = trueup.calibrate(model, [images(24)], decide=False)
    found = tasks(trueup.correct(model, targets, GATED))
    assert {name for name, told in found.items() if "norm" not in told} == set(targets.gate)


class Doubled(nn.BatchNorm2d):
    """Something that a plain batch norm is not."""

    trueup_site = "norm"

    def forward(self, x):
        return 2 * super().forward(x)


def without_bias():
    norm = nn.BatchNorm2d(4)
    norm.bias = None
    return norm


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(nn.BatchNorm2d(4, affine=False), id="not affine"),
        pytest.param(nn.BatchNorm2d(4, track_running_stats=False), id="no running statistics"),
        pytest.param(without_bias(), id="no bias"),
        pytest.param(nn.SyncBatchNorm(4), id="SyncBatchNorm"),
        pytest.param(Doubled(4), id="a subclass"),
        pytest.param(nn.GroupNorm(2, 4), id="GroupNorm"),
        pytest.param(nn.InstanceNorm2d(4), id="InstanceNorm2d"),
    ],
)
def test_other_norms_are_done_by_the_model(norm):
    model = Shared(lambda self, y: self.bn(y))
    model.bn = norm.eval()
    robust = instrumented(model, "norm")
    assert tasks(robust) == {"bn": ()}
    assert robust(dark()).equal(model.head(1.5 * norm(model.conv(dark())) - 0.1))


@pytest.mark.parametrize("name", ["bn", "relu"])
def test_a_module_with_a_forward_of_its_own_is_called(name):
    """As libraries that place the parts of a model on several devices give to each."""
    model = Block(lambda self, y, x: self.relu(y))
    module = model.get_submodule(name)
    module.forward = lambda x: 2 * type(module).forward(module, x)
    robust = instrumented(model, "norm")
    assert tasks(robust) == {"bn": ("relu",) if name == "bn" else ("norm",)}
    wanted = apart(robust)
    assert robust(dark()).equal(wanted(dark()))
    del module.forward
    assert not wanted(dark()).equal(instrumented(model, "norm")(dark()))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("on", ["bn", "relu"])
def test_hooks_still_run(register, inplace, on):
    model, calls = Block(lambda self, y, x: self.relu(y), nn.ReLU(inplace)), []
    getattr(model.get_submodule(on), register)(lambda *_: calls.append(on))
    assert tasks(instrumented(model, "norm")) == {"bn": ("relu",) if on == "bn" else ("norm",)}
    assert tasks(instrumented(model, "activation")) == {"relu": ("relu",) if on == "bn" else ()}
    assert calls == [on, on]


def take_the_batch(norm):
    norm.train()


def forget(norm):
    norm.running_mean = norm.running_var = None


def double(norm):
    norm.register_forward_hook(lambda _m, _i, out: 2 * out)


def widen(norm):
    norm.eps = torch.tensor(0.5).numpy()[()]  # a float of numpy's


def shift(norm):
    norm.running_mean += 1


@pytest.mark.parametrize("change", [take_the_batch, forget, double, widen, shift])
@pytest.mark.parametrize("rule", [EVERYONE, PAPER], ids=["everyone", "paper"])
def test_a_batch_norm_may_change_after_the_module_was_made(change, rule):
    robust = corrected(Block(lambda self, y, x: self.relu(y)), rule)
    assert "norm" in next(iter(tasks(robust).values()))
    twin, x = apart(robust), dark()
    with torch.no_grad():
        before = robust(x)
        for module in (robust, twin):
            change(module.model.bn)
        out = robust(x)
        assert out.equal(twin(x))
        assert not out.equal(before)
    assert robust.model.bn.num_batches_tracked == twin.model.bn.num_batches_tracked


def test_weights_may_be_loaded_and_cast_after_the_module_was_made():
    model, other = make("resnet"), make("resnet")
    robust = corrected(model, EVERYONE)
    for module in other.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
    before = robust(dark())
    robust.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert not robust(dark()).equal(before)
        assert robust(dark()).equal(apart(robust)(dark()))
        assert robust.bfloat16()(dark().bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("able", "wanted"),
    [
        (("batch_norm", "add", "relu"), ("norm", LAST, "relu")),
        (("add", "relu"), (LAST, "relu")),
        (("add",), (LAST,)),
        (("batch_norm",), ("norm",)),
        (("relu",), ()),  # the sum stands between
        ((), ()),
    ],
)
def test_a_module_is_given_only_what_it_offers_to_do(able, wanted):
    model, x = Block(residual_first), images(2)
    robust = Instrumented(trace(model), lambda site: Change(site, able) if site.kind == "norm" else None)
    assert tasks(robust, x) == {"bn": wanted}
    assert robust(x).equal(apart(robust)(x))


def test_what_has_something_placed_itself_stays():
    robust, x = instrumented(Block(residual_first)), images(2)
    assert tasks(robust, x) == {"bn": ("norm", LAST), "relu": ("relu",)}
    assert robust(x).equal(apart(robust)(x))


@pytest.mark.parametrize("which", ["leaky_relu", "relu", "add"])
def test_what_follows_another_site_is_not_done_before_it(which):
    model = Block(lambda self, y, x: F.relu(torch.add(F.leaky_relu(y), self.other(x))))
    traced = trace(model, activations=(torch.add,))
    robust = Instrumented(traced, lambda site: Change(site) if site.name == which else None)
    assert tasks(robust) == {which: ("relu",) if which == "relu" else ()}
    assert robust(dark()).equal(apart(robust)(dark()))


def test_a_sum_that_is_itself_a_site_stays():
    model = Block(lambda self, y, x: F.relu(torch.add(y, self.other(x))))
    robust = instrumented(model, "activation", activations=(torch.add,))
    assert tasks(robust) == {"add": (), "relu": ("relu",)}
    assert robust(dark()).equal(apart(robust)(dark()))


def test_what_is_read_is_what_the_norm_gave():
    class Mean(nn.Module):
        def __init__(self, site) -> None:
            super().__init__()

        def forward(self, a: Tensor) -> Tensor:
            return a.mean((1, 2, 3))

    class Given(Change):
        def forward(self, a: Tensor, given: Tensor, **options) -> Tensor:
            self.given = given
            return super().forward(a, **options)

    model, x = Block(iadd, nn.ReLU(inplace=True)), images(2)
    reading = Reading(["bn"], Mean, nn.Identity())
    robust = Instrumented(trace(model), lambda site: Given(site) if site.name == "bn" else None, reading=reading)
    assert tasks(robust, x) == {"bn": (INTO, "relu")}
    torch.testing.assert_close(robust.placed[0].given, model.bn(model.conv(x)).mean((1, 2, 3)))


@pytest.mark.parametrize("rest", [lambda y, x: (y + 1) + x, lambda y, x: y + x], ids=["a sum of it", "itself"])
def test_where_other_names_read_what_is_written_nothing_is_done_together(rest):
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return rest(self.relu(x), x)

    robust, x = instrumented(Aliased().eval()), images(2)
    assert tasks(robust, x) == {"relu": ()}
    assert robust(x).equal(apart(robust)(x))


@pytest.mark.parametrize("relu6", [nn.ReLU6(), nn.ReLU6(inplace=True)], ids=["module", "in place"])
def test_a_relu6_is_done_with_the_correction_before_it(relu6):
    model, x = Block(lambda block, a, _x: block.relu(a), relu6), dark(4)
    nn.init.constant_(model.bn.weight, 30.0)
    targets = trueup.calibrate(model, [images(20)], decide=False)
    robust = trueup.correct(model, targets, EVERYONE)
    assert list(tasks(robust, x).values()) == [("norm", "relu6")]
    with torch.no_grad():
        assert robust(x).equal(apart(robust)(x))
        limited = robust.placed[0](model.conv(x), norm=model.bn, relu=True, ceiling=6.0)
    assert (limited == 6).any()


def test_a_module_that_does_not_know_relu6_leaves_it():
    robust = instrumented(Block(lambda block, a, _x: block.relu(a), nn.ReLU6()), "norm")
    assert list(tasks(robust).values()) == [("norm",)]
