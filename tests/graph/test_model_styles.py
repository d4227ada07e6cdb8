"""Ways in which people write models, each of which a retrofit that follows the forward pass could get wrong."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from architectures import images
from trueup.graph import Instrumented, clone, trace

LEFT_ALONE = trueup.Correction(lambda1=0)
PAPER = trueup.Correction()


class Double(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a * 2


def names(sites):
    return [site.name for site in sites]


def doubled(model, **options):
    """The model with every activation's output doubled."""
    return Instrumented(trace(model, **options), lambda _: Double())


class Written(nn.Module):
    """A convolution, and the rest of the forward pass as a function of its output."""

    def __init__(self, rest) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)
        self.same, self.drop = nn.Identity(), nn.Dropout()
        self.rest = rest

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self, self.conv(x))


def _augmented(self, h):
    kept = [h]
    h += F.relu(h)
    h *= 2
    h -= 0.5
    h /= 3
    return h + kept[0]


def test_augmented_assignment_changes_the_tensor_that_others_hold():
    model = Written(_augmented).eval()
    targets = trueup.calibrate(model, [images(4)], decide=False)
    assert trueup.correct(model, targets, LEFT_ALONE)(images(4)).equal(model(images(4)))


def _skip_through_identity(self, h):
    skip = self.same(h)
    return self.relu(h) + 10 * skip


def _view_before(self, h):
    view = h.flatten(1)
    F.relu_(h)
    return view


def _part_of_a_tensor(self, h):
    F.relu_(h[:, :2])
    return h


def _through_dropout(self, h):
    self.relu(self.drop(h))
    return h


def _after_augmented(self, h):
    skip = h
    h += 0.1
    torch.relu_(h)
    return skip * 1.0


@pytest.mark.parametrize(
    ("rest", "wanted"),
    [
        (_skip_through_identity, lambda h: 22 * h.relu()),
        (_view_before, lambda h: 2 * h.relu().flatten(1)),
        (_part_of_a_tensor, lambda h: torch.cat([2 * h[:, :2].relu(), h[:, 2:]], dim=1)),
        (_through_dropout, lambda h: 2 * h.relu()),
        (_after_augmented, lambda h: 2 * (h + 0.1).relu()),
    ],
)
def test_what_is_written_in_place_is_read_corrected_by_every_name(rest, wanted):
    model, x = Written(rest).eval(), images(2)
    torch.testing.assert_close(doubled(model)(x), wanted(model.conv(x)))


def test_gradients_flow_through_an_ordinary_in_place_activation():
    model = Written(lambda self, h: self.relu(h)).eval()
    robust = trueup.correct(model, trueup.calibrate(model, [images(4)], decide=False), PAPER)
    x = images(2).requires_grad_()
    robust(x).sum().backward()
    assert x.grad.abs().sum() > 0


class Options(nn.Module):
    """Inputs that are switches, and outputs that are not one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x, mask=None, features=False, mode="mean", scale=1.0):
        x = F.relu(self.conv(x))
        if mask is not None:
            x = x * mask
        out = x.mean((2, 3)) if mode == "mean" else x.amax((2, 3))
        return {"out": out * scale, "all": (x, x + 1)} if features else out * scale


def test_optional_inputs_keep_their_defaults_and_their_names():
    model = Options().eval()
    targets = trueup.calibrate(model, [images(4)], decide=False)
    robust = trueup.correct(model, targets, LEFT_ALONE)
    assert robust(images(4)).equal(model(images(4)))
    assert robust(x=images(4), mask=None, features=False, scale=2.0).equal(model(images(4), scale=2.0))
    mask = torch.arange(30.0)
    assert robust(images(4), mask=mask).equal(model(images(4), mask=mask))
    assert robust(images(4), None, True)["all"][1].equal(model(images(4), features=True)["all"][1])
    assert robust(images(4), mode="max").equal(model(images(4), mode="max"))


def test_an_optional_input_is_corrected_as_the_default_is():
    model, mask = Options().eval(), torch.arange(30.0)
    targets = trueup.calibrate(model, [images(4)], decide=False)
    strong = trueup.correct(model, targets, trueup.Correction(1, 0))
    wanted = strong(images(2) + 1, None, True)["all"][0] * mask  # what it multiplies is the corrected map
    torch.testing.assert_close(strong(images(2) + 1, mask), wanted.mean((2, 3)))
    assert strong(images(2) + 1, None, True)["out"].equal(strong(images(2) + 1))


def test_calls_with_an_optional_input_clone_the_model_once_and_follow_its_changes(monkeypatch):
    model, made = Options().eval(), []
    robust = trueup.correct(model, trueup.calibrate(model, [images(4)], decide=False), LEFT_ALONE)
    monkeypatch.setattr("trueup.graph.instrument.clone", lambda inner: made.append(inner) or clone(inner))
    for _ in range(3):
        assert robust(images(4), mode="max").equal(model(images(4), mode="max"))
    assert len(made) == 1
    other = Options().eval()
    robust.load_state_dict(other.state_dict(), assign=True)
    assert robust(images(4), mode="max").equal(other(images(4), mode="max"))
    wide = pickle.loads(pickle.dumps(robust)).double()
    torch.testing.assert_close(wide(images(4).double(), mode="max").float(), other(images(4), mode="max"))
    robust.get_submodule("conv").register_forward_hook(lambda _module, _args, out: 0 * out)
    assert robust(images(4), mode="max").eq(0).all()


def test_an_optional_input_that_calibration_was_given_stays_one():
    model, mask = Options().eval(), torch.rand(30)
    targets = trueup.calibrate(model, [images(4)], transform=lambda x: (x, mask), decide=False)
    assert not targets.sites.traced
    assert "optional inputs" in str(targets)
    robust = trueup.correct(model, targets, LEFT_ALONE)
    assert robust(images(2), mask).equal(model(images(2), mask))
    assert robust(images(2)).equal(model(images(2)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor):
        x = F.relu(self.conv(x))
        return {"logits": x.mean((2, 3)), "maps": (x, [x + 1])}


def test_outputs_may_be_nested():
    model = Nested().eval()
    robust = trueup.correct(model, trueup.calibrate(model, [images(4)], decide=False), LEFT_ALONE)
    assert robust(images(2))["maps"][1][0].equal(model(images(2))["maps"][1][0])


class Modes(nn.Module):
    """Behaves differently in training, in Python rather than in modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.conv(x)), 0.5, training=self.training)
        return x * 100 if self.training else x


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_made_in_training_mode_is_right_in_both(copier):
    model = Modes().eval()
    robust = trueup.correct(model, trueup.calibrate(model, [images(4)], decide=False), PAPER)
    wanted = robust(images(4))
    twin = copier(robust.train())
    assert twin.training
    assert twin.model.training
    assert twin.eval()(images(4)).equal(wanted)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 4, 1), Written(lambda self, h: F.relu(h))
        self.block.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block(self.stem(x))))


def test_a_block_used_three_times_has_three_sites_by_its_one_name():
    assert names(trueup.sites(Shared(), images(2))) == ["block.relu", "block.relu#2", "block.relu#3"]


class Placed(nn.Module):
    """Its parts have the names that a retrofit uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.placed = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.model = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.placed(x))


def test_names_of_submodules_do_not_collide():
    model = Placed().eval()
    robust = trueup.correct(model, trueup.calibrate(model, [images(4)], decide=False), LEFT_ALONE)
    assert robust(images(2)).equal(model(images(2)))
    assert list(robust.state_dict()) == list(model.state_dict())
    robust.load_state_dict(model.state_dict())


class SubclassedReLU6(nn.ReLU6):
    pass


def test_a_subclass_of_a_known_activation_is_one():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), SubclassedReLU6())
    assert names(trueup.sites(model)) == ["1"]


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class WideSwish(Swish):
    pass


def test_a_class_and_its_subclass_can_both_be_named():
    model = nn.Sequential(Swish(), WideSwish())
    assert names(trueup.sites(model, activations=(Swish, WideSwish))) == ["0", "1"]


def test_hooks_of_the_model_see_tensors_only_and_stay():
    model, seen = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), nn.Flatten()), []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(float(out.detach().mean())))
    model.register_forward_pre_hook(lambda _m, inputs: seen.append(float(inputs[0].mean())))
    assert names(trueup.sites(model)) == ["0.1"]
    assert seen == []
    targets = trueup.calibrate(model, [images(2)], decide=False)
    trueup.correct(model, targets, PAPER)
    seen.clear()
    model(images(2))
    assert len(seen) == 2


def test_a_hook_that_changes_values_is_noticed_and_runs():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    model.register_forward_hook(lambda _m, _i, out: out * 2)
    targets = trueup.calibrate(model, [images(2)], decide=False)
    assert "differ from those of its traced forward pass" in str(targets)
    assert trueup.correct(model, targets, LEFT_ALONE)(images(2)).equal(model(images(2)))


def test_a_hook_is_noticed_however_small_the_outputs_are():
    """As are probabilities of thousands of classes."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), Scaled()).eval()
    model.register_forward_hook(lambda _m, _i, out: out * 2)
    targets = trueup.calibrate(model, [images(2)], decide=False)
    assert "differ from those of its traced forward pass" in str(targets)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_scores_of_masked_classes_do_not_hide_a_hook_nor_prevent_tracing(value):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), Masking(value)).eval()
    assert trueup.calibrate(model, [images(2)], decide=False).sites.traced
    model.register_forward_hook(lambda _m, _i, out: out * 2)
    assert not trueup.calibrate(model, [images(2)], decide=False).sites.traced


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1e-5 * x


class Masking(nn.Module):
    """Gives the last class of each image an infinite score, or none."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        scores = x.mean(dim=(2, 3))
        return torch.cat([scores, torch.full_like(scores[:, :1], self.value)], dim=1)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + torch.randn(3, 1, 1))


def test_randomness_is_not_frozen():
    targets = trueup.calibrate(Noisy(), [images(2)], decide=False)
    assert not targets.sites.traced
    robust = trueup.correct(Noisy(), targets, PAPER)
    assert not robust(images(2)).equal(robust(images(2)))


class Remembers(nn.Module):
    """Counts its calls in a buffer and keeps its last feature map as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.features = F.relu(self.conv(x))
        return self.features.mean((2, 3))


def test_what_a_forward_pass_leaves_behind_is_not_the_tracers():
    model = Remembers().eval()
    assert names(trueup.sites(model)) == ["relu"]
    assert model.calls.item() == 0
    assert not hasattr(model, "features")
    robust = trueup.correct(model, trueup.calibrate(model, [images(2)], decide=False), PAPER)
    assert model.calls.item() == 0
    assert not any("features" in vars(module) for module in robust.modules())
    assert pickle.loads(pickle.dumps(robust))(images(2)).equal(robust(images(2)))


class Averages(Remembers):
    """Keeps a running average of its features, even in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.calls.mul_(0.5).add_(out.detach().mean())
        return out


def test_targets_fit_a_model_that_changes_its_own_buffers(tmp_path):
    model = Averages().eval()
    targets = trueup.calibrate(model, images(8).split(4), decide=False)
    targets.save(tmp_path / "file")
    for _ in range(3):
        model(images(4))
    for known in (targets, trueup.Targets.load(tmp_path / "file"), targets + targets):
        trueup.correct(model, known, PAPER)
    with torch.no_grad():
        model.conv.weight.mul_(-1)
    with pytest.raises(ValueError, match="'conv.weight' has other values"):
        trueup.correct(model, targets, PAPER)


def test_calibrating_leaves_the_images_of_an_in_place_model():
    model, x = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 1)), images(4)
    before = x.clone()
    targets = trueup.calibrate(model, [x], decide=False)
    trueup.measure(model, targets, x)
    assert x.equal(before)


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * torch.tensor([2.0])


def test_copies_of_copies_do_not_grow():
    robust = Instrumented(trace(Constant()), lambda _: None)
    for _ in range(3):
        robust = copy.deepcopy(robust)
    assert len(list(robust.buffers())) == 1


def test_weight_norm_survives_a_cast():
    with pytest.warns(FutureWarning):
        conv = nn.utils.weight_norm(nn.Conv2d(3, 4, 1))
    model = nn.Sequential(conv, nn.ReLU())
    robust = trueup.correct(model, trueup.calibrate(model, [images(4)], decide=False), PAPER)
    wanted = robust(images(2))
    torch.testing.assert_close(robust.double()(images(2).double()).float(), wanted, atol=1e-2, rtol=1e-2)
    assert model(images(2)).dtype == torch.float32


def test_a_replica_for_data_parallel_is_its_own():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)).eval()
    for rule in (trueup.Correction(), trueup.Evidence()):
        robust = trueup.correct(model, trueup.calibrate(model, [images(20)], decide=False), rule)
        replica = robust._replicate_for_data_parallel()
        assert replica.forward.__self__ is replica
        assert replica(images(2) * 3).equal(robust(images(2) * 3))


def test_an_own_function_with_a_flag_is_not_taken_for_in_place():
    model = Flagged().eval()
    targets = trueup.calibrate(model, [images(2)], activations=(flagged,), decide=False)
    assert trueup.correct(model, targets, LEFT_ALONE, activations=(flagged,))(images(2)).equal(model(images(2)))
    torch.testing.assert_close(
        doubled(model, activations=(flagged,))(images(2)),
        2 * images(2).clamp(min=0.1) - images(2),
    )


def flagged(x: Tensor, _verbose: bool) -> Tensor:
    return x.clamp(min=0.1)


class Flagged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return flagged(x, True) - x


class RootBranches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) if x.mean() > 0 else x


def test_a_branch_in_the_outermost_forward_pass_is_followed_as_it_is_taken():
    model = RootBranches()
    assert names(trueup.sites(model)) == []  # functions are only seen in a run
    assert names(trueup.sites(model, images(2).abs())) == ["relu"]
    assert names(trueup.sites(model, -images(2).abs())) == []


def test_a_transformer_encoder_is_reached():
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.Sequential(nn.ReLU(), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)).eval()
    x = torch.randn(4, 5, 8)
    inside = ["1.layers.0.norm1", "1.layers.0.relu", "1.layers.0.norm2"]
    assert names(trueup.sites(model, x)) == ["0", *inside]
    targets = trueup.calibrate(model, [x], decide=False)
    for rule in (trueup.Correction(1, 0), trueup.Evidence(budget=1, strength=0.2)):
        assert not trueup.correct(model, targets, rule)(x + 1).isclose(model(x + 1)).all()


@pytest.mark.parametrize("rule", [LEFT_ALONE, trueup.Evidence(budget=1, strength=0, base=0)], ids=["paper", "evidence"])
def test_a_rule_of_no_strength_leaves_a_transformer_layer_its_fast_path(rule):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu", norm_first=True)
    model, x = nn.Sequential(nn.LayerNorm(16), layer).eval(), torch.randn(4, 16, 16)
    targets = trueup.calibrate(model, [torch.randn(8, 16, 16)], decide=False)
    with torch.no_grad():
        assert trueup.correct(model, targets, rule)(x).equal(model(x))


def test_wrappers_are_taken_off_in_any_order():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    assert names(trueup.sites(nn.DataParallel(torch.compile(model)))) == ["1"]
