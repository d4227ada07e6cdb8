"""Sites: found in every architecture, named so that a person knows where they are, left alone where asked."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import architectures
import trueup
from architectures import images, make
from trueup.graph import Instrumented, clone, trace

SITES = {
    "vgg": ["1", "4", "7", "11"],
    "mobilenet": [
        "stem.2",
        "blocks.0.conv.0.2",
        "blocks.0.conv.1.2",
        "blocks.1.conv.0.2",
        "blocks.1.conv.1.2",
    ],
    "densenet": ["relu", "relu#2", "relu#3", "relu#4"],
    "convnext": ["blocks.0.act", "blocks.1.act"],
    "vit": ["blocks.0.gelu", "blocks.1.gelu"],
    "resnet": [
        "relu",
        "layer1.0.relu",
        "layer1.0.relu#2",
        "layer1.0.relu#3",
        "layer1.1.relu",
        "layer1.1.relu#2",
        "layer1.1.relu#3",
    ],
    "spellings": [
        *["relu", "relu#2", "relu#3", "relu#4", "relu#5", "relu#6"],
        *["relu6", "leaky_relu", "silu", "hardswish"],
        *[f"modules_too.{k}" for k in range(5)],
    ],
}


def names(sites, kind=None):
    return [site.name for site in sites if kind in (None, site.kind)]


def instrumented(model, place, **options):
    return Instrumented(trace(model, **options), place)


@pytest.mark.parametrize("name", architectures.ALL)
def test_every_activation_is_a_site_with_a_readable_name(name):
    model = make(name)
    assert names(trueup.sites(model, images(2)), "activation") == SITES[name]
    assert names(trueup.sites(model), "activation") == SITES[name]


NORMS = {
    "vgg": [],
    "mobilenet": ["stem.1", *[f"blocks.{k}.conv.{part}" for k in (0, 1) for part in ("0.1", "1.1", "3")]],
    "densenet": ["norms.0", "norms.1", "norms.2"],
    "convnext": ["blocks.0.norm", "blocks.1.norm"],
    "vit": ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2"],
    "resnet": [f"layer1.{k}.bn{n}" for k in (0, 1) for n in (1, 2, 3)],
    "spellings": [],
}


@pytest.mark.parametrize("name", architectures.ALL)
def test_every_norm_is_a_site_of_the_other_kind(name):
    model = make(name)
    assert names(trueup.sites(model), "norm") == NORMS[name]
    assert names(trueup.sites(model, images(2)), "norm") == NORMS[name]


@pytest.mark.parametrize("name", architectures.ALL)
def test_sites_come_in_the_order_of_the_forward_pass(name):
    model, order = make(name), []
    for path, module in model.named_modules():
        module.register_forward_hook(lambda _m, _i, _o, path=path: order.append(path))
    model(images(2))
    called = [site.name.partition("#")[0] for site in trueup.sites(model) if "#" not in site.name]
    modules = [path for path in called if path in order]
    assert modules == sorted(modules, key=order.index)


def test_sites_print_as_a_table():
    assert str(trueup.sites(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))).splitlines() == [
        "site  kind        operation",
        "0     norm        batch_norm",
        "1     activation  relu",
    ]


class OwnNorm(nn.Module):
    """A norm that says so."""

    trueup_site = "norm"

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean((2, 3), keepdim=True).sqrt()


class Renamed(nn.BatchNorm2d):
    """A norm under another name."""


class NormSpellings(nn.Module):
    """Norms in all the ways to write them; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.gn, self.inorm = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)
        self.ln, self.whole, self.open = nn.LayerNorm(4), nn.LayerNorm((4, 8, 8)), nn.LayerNorm((8, 4))
        self.rms, self.own, self.renamed = nn.RMSNorm(4), OwnNorm(), Renamed(4)
        self.flat, self.conv = nn.BatchNorm1d(4), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        x = self.bn(self.gn(self.inorm(x)))
        x = self.whole(self.renamed(self.own(x)))
        x = F.group_norm(F.batch_norm(x, self.bn.running_mean, self.bn.running_var), 2)
        x = self.open(self.rms(self.ln(x.permute(0, 2, 3, 1))))
        x = F.layer_norm(x, (4,)).permute(0, 3, 1, 2)
        return self.flat(F.instance_norm(x).mean((2, 3)))


def test_norms_are_known_by_their_layers_their_functions_and_their_own_word():
    model, x = NormSpellings().eval(), images(3, size=8)
    found = {site.name: (site.operation, site.channel_dim) for site in trueup.sites(model)}
    assert found == {
        "bn": ("batch_norm", 1),
        "inorm": ("instance_norm", 1),
        "gn": ("group_norm", 1),
        "bn#2": ("batch_norm", 1),
        "own": ("OwnNorm", 1),
        "renamed": ("batch_norm", 1),
        "whole": ("layer_norm", 1),  # (channels, height, width)
        "batch_norm": ("batch_norm", 1),
        "group_norm": ("group_norm", 1),
        "ln": ("layer_norm", -1),  # channels last
        "rms": ("rms_norm", -1),
        "layer_norm": ("layer_norm", -1),  # `open` is none: which of its two dimensions holds channels is not clear
        "instance_norm": ("instance_norm", 1),
        "flat": ("batch_norm", 1),
    }
    targets = trueup.calibrate(model, [images(12, size=8)], decide=False)
    assert list(targets.norms) == list(found)
    assert {len(site.total[0]) for site in targets.norms.values()} == {4}
    shapes = {name: site.shape for name, site in targets.norms.items()}
    assert shapes["ln"] == (4, 8, 8)
    assert shapes["flat"] == (4,)
    robust = trueup.correct(model, targets, trueup.Evidence(budget=1, strength=0.2))
    assert robust(3 * x + 1).shape == (3, 4)
    assert not robust(3 * x + 1).equal(model(3 * x + 1))


def test_a_norm_over_all_tokens_of_all_images_is_corrected_per_image():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.tokens = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.bn(self.conv(x)).relu().flatten(2).transpose(1, 2)
            return self.tokens(x.reshape(-1, 4)).reshape(x.shape)

    targets = trueup.calibrate(Tokens().eval(), [images(3)], decide=False)
    assert list(targets.activations) == ["relu"]
    assert list(targets.norms) == ["bn", "tokens"]
    assert targets.norms["tokens"].shape == (4, 900)
    assert {site.name for site in targets.sites if site.folded} == {"tokens"}


@pytest.mark.parametrize("name", architectures.ALL)
def test_placing_nothing_changes_nothing(name):
    model, x = make(name), images()
    assert instrumented(model, lambda _: None)(x).equal(model(x))
    assert instrumented(model, lambda _: nn.Identity())(x).equal(model(x))


@pytest.mark.parametrize("name", architectures.ALL)
def test_what_is_placed_at_a_site_sees_the_output_of_its_activation(name):
    """Against forward hooks and patched functions: an independent way to see the same values."""
    model, x = make(name), images(3)
    seen: list[Tensor] = []
    probe = instrumented(model, lambda site: _Keep(seen) if site.kind == "activation" else None)
    probe(x)

    wanted: list[Tensor] = []
    with _patched(wanted):
        model(x)
    assert len(seen) == len(wanted)
    for ours, theirs in zip(seen, wanted, strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("name", [name for name, norms in NORMS.items() if norms])
def test_what_is_placed_at_a_norm_sees_its_output(name):
    model, x = make(name), images(3)
    seen: list[Tensor] = []
    instrumented(model, lambda site: _Keep(seen) if site.kind == "norm" else None)(x)
    wanted: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            module.register_forward_hook(lambda _m, _i, out: wanted.append(out.clone()))
    model(x)
    assert len(seen) == len(wanted) == len(NORMS[name])
    assert all(ours.equal(theirs) for ours, theirs in zip(seen, wanted, strict=True))


def test_zeros_mean_something_for_relu_and_nothing_for_the_others():
    sparse = {site.operation: site.sparse for site in trueup.sites(make("spellings"))}
    assert {name for name, is_sparse in sparse.items() if is_sparse} == {"relu", "relu6"}
    assert {name for name, is_sparse in sparse.items() if not is_sparse} == {
        "leaky_relu",
        "silu",
        "hardswish",
        "gelu",
    }


@pytest.mark.parametrize(("activation", "stays"), [(nn.ReLU(), True), (nn.SiLU(), False), (nn.LeakyReLU(), False)])
def test_zeros_stay_where_they_mean_something(activation, stays):
    model = nn.Sequential(activation)
    targets = trueup.calibrate(model, [torch.randn(8, 50) + 3], decide=False)
    x = torch.randn(2, 50)
    x[:, :10] = 0
    corrected = trueup.correct(model, targets, trueup.Correction(1, 0, location="match"))(x)
    assert (corrected[:, :10] == 0).all() == stays


class InPlaceThenInput(nn.Module):
    """Reads the input of an in-place activation afterwards: by then it holds the output."""

    def __init__(self, activate) -> None:
        super().__init__()
        self.conv, self.relu, self.activate = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), activate

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        before = x * 3
        y = self.activate(self, x)
        return before + y + 10 * x


@pytest.mark.parametrize(
    "activate",
    [
        lambda self, x: self.relu(x),
        lambda self, x: F.relu(x, inplace=True),
        lambda self, x: F.relu(x, True),
        lambda self, x: x.relu_(),
        lambda self, x: torch.relu_(x),
    ],
    ids=["module", "keyword", "positional", "method", "torch.relu_"],
)
def test_reading_the_input_after_an_in_place_activation_means_its_output(activate):
    class Double(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return a * 2

    model, x = InPlaceThenInput(activate).eval(), images(2)
    pre = model.conv(x)
    wanted = pre * 3 + 11 * (2 * pre.relu())
    torch.testing.assert_close(instrumented(model, lambda _: Double())(x), wanted)


def swish(x: Tensor) -> Tensor:
    """A user's own activation function."""
    return x * torch.sigmoid(x)


class Mish(nn.Module):
    """A user's own activation module."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(F.softplus(x))


class Declared(nn.Module):
    """One that says so itself."""

    trueup_site = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(x, x.new_tensor(0.25))


class OwnActivations(nn.Module):
    """Uses all three."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mish, self.unit = nn.Conv2d(3, 4, 3), Mish(), Declared()

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(swish(self.mish(swish(self.conv(x)))))


def test_a_users_own_activations_can_be_named():
    model = OwnActivations()
    assert names(trueup.sites(model)) == ["unit"]
    assert names(trueup.sites(model, activations=(swish, Mish))) == ["swish", "mish", "swish#2", "unit"]
    targets = trueup.calibrate(model, [images()], activations=(swish, Mish), decide=False)
    robust = trueup.correct(model, targets, trueup.Correction(1, 0), activations=(swish, Mish))
    assert not robust(images(seed=2)).equal(model(images(seed=2)))


def test_a_named_activation_that_is_never_called_is_an_error():
    with pytest.raises(ValueError, match="Mish is never called"):
        trueup.sites(make("vgg"), activations=(Mish,))


def test_sites_are_chosen_by_a_predicate():
    model = make("resnet")
    chosen = trueup.sites(model, select=lambda site: "layer1.1" in site.name)
    assert names(chosen, "activation") == SITES["resnet"][4:]
    assert names(chosen, "norm") == NORMS["resnet"][3:]
    targets = trueup.calibrate(
        model, [images()], select=lambda site: site.kind == "activation" and "#" not in site.name, decide=False
    )
    assert list(targets.activations) == ["relu", "layer1.0.relu", "layer1.1.relu"]
    robust = trueup.correct(model, targets, trueup.Correction(), select=lambda site: site.name != "relu")
    assert names(robust.sites) == robust.placed_at == ["layer1.0.relu", "layer1.1.relu"]


def test_control_flow_is_followed_with_the_place_and_the_reason():
    model = architectures.branching()
    model(images(2))  # lets the lazy layer see its shape
    assert names(trueup.sites(model, images())) == ["1", "2.relu"]
    said = str(trueup.sites(model))
    assert "untraced" in said
    assert "2 (Branching" in said
    assert "control flow" in said
    assert names(trueup.sites(model, images(), leaves=(architectures.Branching,))) == ["1"]
    targets = trueup.calibrate(model, [images()], leaves=(architectures.Branching,), decide=False)
    assert targets.sites.traced
    robust = trueup.correct(model, targets, trueup.Correction(), leaves=(architectures.Branching,))
    assert not robust(images()).equal(model(images()))


def test_modules_of_torch_that_tracing_does_not_enter_are_reached():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)).eval()
    assert names(trueup.sites(model, torch.randn(2, 5, 8))) == ["1", "2.norm1", "2.relu", "2.norm2"]


def test_a_clone_shares_tensors_and_nothing_else():
    model = make("mobilenet")
    twin = clone(model)
    for (name, mine), (other, theirs) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert name == other
        assert mine.data_ptr() == theirs.data_ptr()
    assert not {id(m) for m in model.modules()} & {id(m) for m in twin.modules()}
    twin.train()
    assert not model.training
    assert not any(module.training for module in model.modules())


def test_a_compiled_or_parallel_model_is_unwrapped():
    model = make("vgg")
    assert names(trueup.sites(torch.compile(model))) == SITES["vgg"]
    assert names(trueup.sites(nn.DataParallel(model))) == SITES["vgg"]


def test_tensors_made_in_the_forward_pass_follow_to_another_device():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.conv(x)) * torch.tensor([2.0])

    model, x = Scaled().eval(), images(2)
    moved = copy.deepcopy(instrumented(model, lambda _: nn.Identity())).to("meta")
    assert moved(x.to("meta")).device.type == "meta"  # a tensor left behind would be refused
    assert moved.state_dict().keys() == model.state_dict().keys()


class _Keep(nn.Module):
    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, a: Tensor) -> Tensor:
        self.seen.append(a.clone())
        return a


class _patched(torch.overrides.TorchFunctionMode):  # noqa: N801
    """Keeps a copy of what every activation function returns, whoever calls it."""

    WATCHED = (
        *[F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6, F.leaky_relu],
        *[F.silu, F.gelu, F.hardswish, F.hardtanh],  # nn.ReLU6 is a hardtanh
    )

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            out = function(*args, **(kwargs or {}))
        if function in self.WATCHED:
            self.seen.append(out.clone())
        return out


class _Alias(nn.Module):
    """Overwrites its activations by another name."""

    def __init__(self, alias) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.alias = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), alias

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        F.relu_(self.alias(y))
        return self.head(y)


@pytest.mark.parametrize(
    "alias",
    [
        lambda y: y.mT,
        lambda y: y.data,
        lambda y: +y,
        lambda y: y.float(),
        lambda y: y.type_as(y),
        lambda y: y.ravel(),
        lambda y: y.swapdims(2, 3),
        lambda y: torch.swapaxes(y, 2, 3),
        lambda y: torch.moveaxis(y, 2, 3),
        lambda y: torch.detach(y),
        lambda y: torch.real(y),
        lambda y: torch.conj(y),
        lambda y: F.dropout3d(y, training=False),
        lambda y: F.alpha_dropout(y, training=False),
        lambda y: torch.dropout(y, 0.5, False),
    ],
    ids=[
        "mT",
        "data",
        "pos",
        "float",
        "type_as",
        "ravel",
        "swapdims",
        "swapaxes",
        "moveaxis",
        "detach",
        "real",
        "conj",
        "dropout3d",
        "alpha",
        "dropout",
    ],
)
def test_what_is_written_by_another_name_is_seen_by_that_name(alias):
    model = _Alias(alias)
    zero = instrumented(model, lambda _: _Zero())
    assert zero(torch.randn(2, 3, 8, 8)).equal(model.head(torch.zeros(2, 4, 6, 6)))


class _Zero(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return torch.zeros_like(a)
