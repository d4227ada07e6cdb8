"""Models that cannot be traced: they run as they are, and every promise holds for them too."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import architectures
import trueup
from architectures import images, make
from trueup.graph import Inputs, Instrumented, Sites, examine, trace

PAPER = trueup.Correction(1, 0, location="match", method="sort")
EVIDENCE = trueup.Evidence(budget=1, strength=0.1)
GATED = trueup.Evidence(strength=0.1)
RULES = pytest.mark.parametrize("rule", [PAPER, EVIDENCE, GATED], ids=["paper", "evidence", "gated"])


class Block(nn.Module):
    """Checks shapes in Python, uses one unit twice in place, and a function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        _batch, channels, height, width = x.shape
        assert channels == self.conv1.in_channels
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        if height > 4 and width > 4:
            y = F.max_pool2d(y, 2)
            x = F.avg_pool2d(x, 2)
        return F.gelu(self.act(x + y))


class Checked(nn.Module):
    """A network that torch.fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ModuleList([Block(8), Block(8)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_mean, -0.3, 0.3)
                nn.init.uniform_(module.running_var, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((2, 3))))


NAMES = [
    *[f"blocks.{k}.{part}" for k in (0, 1) for part in ("bn1", "act", "bn2", "act#2", "gelu")],
    "norm",
]


def names(sites):
    return [site.name for site in sites]


def dark(count=6):
    return images(count, seed=3) * 0.3 - 1


def corrected(rule, model=None):
    model = Checked().eval() if model is None else model
    return model, trueup.correct(model, trueup.calibrate(model, images(24).split(8), decide=False), rule)


def test_sites_are_those_of_a_trace():
    model = Checked().eval()
    found = trueup.sites(model, images(2))
    assert names(found) == NAMES
    assert not found.traced
    assert "blocks.0 (Block" in found.note
    # Without a run, in the order in which modules were made; functions and second calls are not known.
    assert sorted(names(trueup.sites(model))) == sorted(n for n in NAMES if "gelu" not in n and "#" not in n)


@pytest.mark.parametrize("watched", [False, True])
def test_the_callers_images_hold_what_an_activation_in_place_made_of_them(watched):
    """The corrected values, if the activation is corrected: the output and its memory agree, as in the model."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten()).eval()
    traced = trace(model)
    found = examine(traced.watched(Sites(traced=False)), Inputs((images(2),))) if watched else traced
    robust, x = Instrumented(found, lambda _: nn.Softplus()), images(2)
    assert robust(x).equal(F.softplus(F.relu(images(2))).flatten(1))
    assert x.flatten(1).equal(robust(images(2)))


class Rectified(nn.Module):
    """Calls a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class Unit(nn.Module):
    """A site as a whole, which shares a part with the model."""

    trueup_site = True

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.part(x)


@pytest.mark.parametrize("watched", [False, True])
def test_what_a_unit_calls_is_no_site_even_in_a_part_that_it_shares(watched):
    part = Rectified()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), part, Unit(part)).eval()
    traced = trace(model)
    found = examine(traced.watched(Sites(traced=False)), Inputs((images(2),))) if watched else traced
    assert names(found.sites) == ["1.relu", "2"]


@pytest.mark.parametrize("name", architectures.ALL)
@RULES
def test_watching_a_model_that_can_be_traced_gives_the_same(name, rule):
    """The traced way is the oracle: the same names, the same targets, the same corrected outputs."""
    model = make(name)
    if isinstance(rule, trueup.Evidence) and name in ("vgg", "spellings"):
        pytest.skip("has no norm")
    targets = trueup.calibrate(model, images(24).split(8), decide=False)
    traced = trace(model)
    watched = examine(traced.watched(Sites(traced=False, why="it was told to")), Inputs((images(2),)))
    assert not watched.sites.traced
    assert list(watched.sites) == list(traced.sites)
    from trueup._correct import build

    wanted = build(traced.known(targets.sites), targets, rule)(dark())
    torch.testing.assert_close(build(watched, targets, rule)(dark()), wanted, atol=1e-5, rtol=1e-4)


@RULES
def test_an_image_has_one_answer_in_any_batch(rule):
    model, robust = corrected(rule)
    x = torch.cat([images(3), dark(3)])
    together = robust(x)
    assert not together.isclose(model(x), atol=1e-4).all()
    torch.testing.assert_close(torch.cat([robust(image[None]) for image in x]), together, atol=1e-4, rtol=1e-4)


@RULES
def test_the_model_is_not_touched_and_its_weights_are_shared(rule):
    model = Checked().eval()
    before, wanted = copy.deepcopy(model.state_dict()), model(dark())
    _, robust = corrected(rule, model)
    robust(dark())
    assert model(dark()).equal(wanted)
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert list(robust.state_dict()) == list(model.state_dict())
    assert {id(p) for p in robust.parameters()} == {id(p) for p in model.parameters()}


@RULES
def test_copies_and_pickles_do_the_same_and_have_weights_of_their_own(rule):
    _, robust = corrected(rule)
    wanted = robust(dark())
    for other in (copy.deepcopy(robust), pickle.loads(pickle.dumps(robust))):
        assert other(dark()).equal(wanted)
        with torch.no_grad():
            other.model.head.weight.zero_()
    assert robust(dark()).equal(wanted)
    assert "untraced" in repr(robust)


@RULES
def test_a_cast_copy_leaves_the_model(rule):
    model, robust = corrected(rule)
    wanted = robust(dark())
    torch.testing.assert_close(robust.double()(dark().double()).float(), wanted, atol=0.05, rtol=0.05)
    assert model.head.weight.dtype == torch.float32


@RULES
def test_compiled_as_one_graph_and_exported(rule):
    _, robust = corrected(rule)
    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(robust, fullgraph=True, backend="aot_eager")(dark())
        torch.testing.assert_close(compiled, robust(dark()), atol=1e-4, rtol=1e-4)
    free = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(robust, (dark(),), dynamic_shapes={"x": free})
    torch.testing.assert_close(program.module()(dark(3)), robust(dark(3)), atol=1e-4, rtol=1e-4)


def test_in_training_mode_it_does_what_the_model_does():
    model, robust = corrected(PAPER)
    twin = copy.deepcopy(model).train()
    assert robust.train()(dark()).equal(twin(dark()))
    assert not robust.eval()(dark()).isclose(model(dark()), atol=1e-4).all()


def test_gradients_reach_the_images():
    _, robust = corrected(EVIDENCE)
    x = dark(2).requires_grad_()
    robust(x).square().sum().backward()
    assert (x.grad.flatten(1).norm(dim=1) > 0).all()


def test_threads_do_not_disturb_each_other():
    _, robust = corrected(GATED)
    inputs = [dark(n + 1) * (n + 1) for n in range(4)]
    with torch.no_grad():
        wanted = [robust(x) for x in inputs]
    found: dict[int, list[bool]] = {}

    @torch.no_grad()  # a thread starts with gradients, which take another path
    def ask(k):
        found[k] = [robust(inputs[k]).equal(wanted[k]) for _ in range(5)]

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: [True] * 5 for k in range(4)}


def test_a_file_carries_how_the_sites_were_found(tmp_path):
    model = Checked().eval()
    targets = trueup.calibrate(model, [images(24)], decide=False)
    targets.save(tmp_path / "t.safetensors")
    again = trueup.Targets.load(tmp_path / "t.safetensors")
    assert again == targets
    assert again.sites == targets.sites
    assert again.sites.note == targets.sites.note
    assert trueup.correct(model, again, EVIDENCE)(dark()).equal(trueup.correct(model, targets, EVIDENCE)(dark()))
    assert (targets + again).sites == targets.sites


def test_what_is_written_in_place_is_read_corrected_by_every_name():
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == 3
            y = x * 1
            F.relu_(y)
            return y

    class Double(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return a * 2

    watched = examine(trace(Reads()), Inputs((images(2),)))
    with torch.no_grad():
        assert Instrumented(watched, lambda _: Double())(images(2)).equal(2 * images(2).relu())


def test_an_activation_function_of_ones_own_needs_a_trace():
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == 3
            return swish(x)

    with pytest.raises(trueup.TraceError, match=r"the function swish \(activations=\) can only be found by tracing"):
        trueup.sites(Own(), images(2), activations=(swish,))


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class SameConv(nn.Conv2d):
    """A convolution that pads by the size of its input, in Python."""

    def forward(self, x: Tensor) -> Tensor:
        pad = max(0, (-int(x.shape[-1]) % 2) + 1)
        return F.conv2d(F.pad(x, (pad, pad, pad, pad)), self.weight, self.bias, self.stride)


def test_a_layer_that_cannot_be_traced_is_called_as_it_is():
    torch.manual_seed(0)
    model = nn.Sequential(SameConv(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), SameConv(4, 4, 3), nn.ReLU()).eval()
    assert trueup.sites(model).traced
    assert names(trueup.sites(model)) == ["1", "2", "4"]
    _, robust = corrected(EVIDENCE, model)
    assert robust(images(2, 33)).shape == model(images(2, 33)).shape


def test_targets_of_a_trace_serve_a_model_that_no_longer_traces():
    """The names mean the same, so the way may change; a cast is watched too."""
    traced = make("resnet")
    targets = trueup.calibrate(traced, [images(24)], decide=False)

    class Asserts(type(traced)):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == 3
            return super().forward(x)

    model = Asserts().eval()
    model.load_state_dict(traced.state_dict())
    robust = trueup.correct(model, targets, EVIDENCE)
    wanted = trueup.correct(traced, targets, EVIDENCE)(dark())
    torch.testing.assert_close(robust(dark()), wanted, atol=1e-5, rtol=1e-4)
    assert not robust.sites.traced
    torch.testing.assert_close(robust.double()(dark().double()).float(), wanted, atol=1e-3, rtol=1e-3)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.act(self.norm(x)))


class Outer(nn.Module):
    """Cannot be traced, and applies a function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = Inner(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 3
        return F.gelu(self.act(self.inner(x)))


def test_sites_inside_a_leaf_are_left_alone():
    model = Outer().eval()
    inside = ["inner.norm", "inner.act", "inner.gelu"]
    assert names(trueup.sites(model, images(2))) == [*inside, "act", "gelu"]
    assert names(trueup.sites(model, images(2), leaves=(Inner,))) == ["act", "gelu"]
    targets = trueup.calibrate(model, [images(4)], leaves=(Inner,), decide=False)
    robust = trueup.correct(model, targets, PAPER, leaves=(Inner,))
    assert names(robust.sites) == ["act", "gelu"]


def test_what_a_placed_module_calls_is_no_site():
    class Busy(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return F.gelu(a) * 0 + 2 * a

    model = Outer().eval()
    watched = examine(trace(model), Inputs((images(2),)))
    busy = Instrumented(watched, lambda site: Busy() if site.name in ("act", "gelu") else None)
    with torch.no_grad():
        wanted = 2 * F.gelu(2 * model.inner(images(2)).relu())
        torch.testing.assert_close(busy(images(2)), wanted)


def test_a_report_comes_with_the_output():
    model = Checked().eval()
    targets = trueup.calibrate(model, images(24).split(8), decide=False)
    robust = trueup.correct(model, targets, GATED, report=True)
    output, report = robust(dark())
    assert output.equal(trueup.correct(model, targets, GATED)(dark()))
    assert set(report) >= {"p", "gate", "evidence"}
    assert len(report["p"]) == len(dark())


def test_hooks_are_in_one_order_for_python_and_for_c():
    """Guards of torch.compile walk the hooks as a plain dictionary, in the order in which they were inserted."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.bn(x) if x.mean() < 9 else x

    model, seen = Branches().eval(), []
    model.bn.register_forward_hook(lambda _m, _i, out: seen.append(out))
    targets = trueup.calibrate(model, [images(4)], decide=False)
    robust = trueup.correct(model, targets, trueup.Evidence(budget=1, strength=0.5))
    hooks = robust.get_submodule("bn")._forward_hooks
    assert len(hooks) == 2
    assert list(hooks) == list(dict.keys(hooks))
    seen.clear()
    assert robust(images(4) + 1).equal(seen[0])  # the user's hook sees what is corrected
