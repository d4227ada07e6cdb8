"""A corrected model among torch's tools: it has the model's names, attributes and signature."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import tracemalloc

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn

import trueup
from architectures import images, make

RULES = {"evidence": trueup.Evidence(), "paper": trueup.Correction(lambda1=1, lambda2=0.2)}
every = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
on_both = pytest.mark.parametrize("name", ["resnet", "vit"])  # the second has parameters of its own beside its modules


def corrected(name, rule):
    model = make(name)
    return model, trueup.correct(model, trueup.calibrate(model, images(24).split(8), decide=False), rule)


@every
@on_both
def test_names_of_parameters_and_buffers_are_those_of_the_state_dict(name, rule):
    model, robust = corrected(name, rule)
    held = [*dict(robust.named_parameters()), *dict(robust.named_buffers())]
    assert set(held) >= set(robust.state_dict())
    assert list(dict(robust.named_parameters())) == list(dict(model.named_parameters()))
    assert [name for name, _ in robust.named_modules() if name in dict(model.named_modules())]
    whole = nn.ModuleDict({"net": robust})
    assert set(dict(whole.named_parameters())) == {f"net.{name}" for name in dict(model.named_parameters())}
    assert {*dict(whole.named_parameters())} <= {*whole.state_dict()}
    for parameter in dict(robust.named_parameters()):
        path, _, last = parameter.rpartition(".")
        assert robust.get_submodule(path)._parameters[last] is model.get_submodule(path)._parameters[last]


@every
@on_both
def test_functional_call_takes_other_weights(name, rule):
    _, robust = corrected(name, rule)
    x, halved = images(3), {key: value / 2 for key, value in robust.named_parameters()}
    before = robust(x)
    found = torch.func.functional_call(robust, halved, (x,))
    assert robust(x).equal(before)
    robust.load_state_dict({**robust.state_dict(), **halved})  # shared with the model, so at the end
    assert robust(x).equal(found)
    assert not found.equal(before)


@every
@on_both
def test_symbolic_tracing_shows_the_corrections_as_modules(name, rule):
    _, robust = corrected(name, rule)
    traced = torch.fx.symbolic_trace(robust)
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    assert [call for call in calls if call.startswith("_placed.")] == [
        f"_placed.{k}" for k in range(len(robust.placed))
    ]
    assert traced(images(4)).equal(robust(images(4)))


@pytest.mark.filterwarnings("ignore:correct. this rule corrects")
@every
@on_both
@pytest.mark.parametrize("which", [True, "all"])
def test_symbolic_tracing_shows_the_report_as_a_module(name, rule, which):
    model = make(name)
    robust = trueup.correct(model, trueup.calibrate(model, [images(24)], decide=False), rule, report=which)
    traced = torch.fx.symbolic_trace(robust)
    assert [node.target for node in traced.graph.nodes if "_report" in str(node.target)] == ["_report"]
    (output, found), (wanted, report) = traced(images(4)), robust(images(4))
    assert output.equal(wanted)
    assert all(found[key].equal(report[key]) for key in report)


def test_the_forward_belongs_to_a_class_and_has_the_models_signature():
    model, robust = corrected("resnet", RULES["evidence"])
    other = corrected("resnet", trueup.Evidence(strength=0.2))[1]
    assert inspect.signature(type(robust).forward) == inspect.signature(type(model).forward)
    assert type(robust).forward(robust, images(2)).equal(robust(images(2)))
    assert not other(images(2) * 0.3).equal(robust(images(2) * 0.3))  # each object has its own
    for module in (robust, copy.deepcopy(robust), pickle.loads(pickle.dumps(robust))):
        assert isinstance(module, trueup.Corrected)
        assert type(module).__name__ == "Corrected"


def test_attributes_of_the_model_are_read_through():
    model = make("resnet")
    model.num_classes, model.labels = 10, ["cat", "dog"]
    robust = trueup.correct(model, trueup.calibrate(model, [images(24)], decide=False), RULES["evidence"])
    assert robust.num_classes == 10
    assert robust.fc is robust.model.fc
    assert pickle.loads(pickle.dumps(robust)).labels == ["cat", "dog"]
    with pytest.raises(AttributeError, match="no attribute 'num_clases'"):
        robust.num_clases  # noqa: B018


@every
def test_names_that_can_be_read_are_listed(rule):
    model = make("resnet")
    model.num_classes = 10
    robust = trueup.correct(model, trueup.calibrate(model, [images(24)], decide=False), rule)
    listed = dir(robust)
    assert {"rule", "sites", "placed", "report", "model", "num_classes", "fc", "layer1", "forward"} <= {*listed}
    assert {name for name in dir(model) if not name.startswith("_")} <= {*listed}
    assert len(listed) == len({*listed})
    for name in (name for name in listed if not name.startswith("_")):
        getattr(robust, name)


def test_a_replaced_submodule_is_used():
    model, robust = corrected("resnet", RULES["evidence"])
    robust.fc = nn.Linear(robust.fc.in_features, 3)
    assert robust(images(2)).shape == (2, 3)
    assert model(images(2)).shape == (2, 10)


def test_scripting_is_refused_in_a_sentence():
    _, robust = corrected("resnet", RULES["evidence"])
    with pytest.raises(TypeError, match="torch.jit.script cannot compile a corrected model.*torch.export"):
        torch.jit.script(robust)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_of_the_model_loads_into_the_corrected_one(tmp_path):
    model, robust = corrected("vit", RULES["evidence"])
    with torch.no_grad():
        saved = {key: value / 2 for key, value in model.state_dict().items()}
    checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    state = robust.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    robust.load_state_dict(state)
    assert all(value.equal(saved[key]) for key, value in robust.named_parameters())


def test_nothing_is_kept_of_models_that_are_gone():
    model = make("compact")
    targets = trueup.calibrate(model, [images(24)], decide=False)

    def round_trip():
        trueup.correct(model, targets, RULES["evidence"])(images(1))
        trueup.measure(model, targets, images(1))

    def memory():
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        for _ in range(5):  # caches fill once
            round_trip()
        before = memory()
        for _ in range(10):
            round_trip()
        assert memory() - before < 60_000  # the texts of two graphs per round would be 200 kB
    finally:
        tracemalloc.stop()


class Owner(nn.Module):
    """Has a part called `model`, as nearly every LightningModule has, and another that both have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.model.head, self.head = nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x):
        for layer in list(self.model)[:3]:
            x = layer(x)
        return self.head(self.model.head(x.mean((2, 3))))


@pytest.mark.parametrize("branch", [False, True], ids=["traced", "watched"])
def test_a_part_called_model_is_found_by_its_name(branch):
    class Branching(Owner):
        def forward(self, x):
            if x.shape[-1] > 4:
                return super().forward(x)
            raise ValueError("too small")

    model = (Branching if branch else Owner)().eval()
    targets = trueup.calibrate(model, [images(8)], decide=False)
    assert targets.sites.traced != branch
    robust, x = trueup.correct(model, targets, trueup.Evidence(budget=1, strength=0.2)), images(2) + 1
    assert list(robust.state_dict()) == list(model.state_dict())
    assert robust.model is robust.get_submodule("model")
    assert robust.model.head.weight is model.model.head.weight
    torch.testing.assert_close(torch.export.export(robust, (x,)).module()(x), robust(x))
    other = {name: value * 0 for name, value in model.named_parameters() if name == "model.head.bias"}
    changed = torch.func.functional_call(robust, other, (x,))
    torch.testing.assert_close(changed, robust(x) - model.head.weight @ model.model.head.bias)


class Names(nn.Module):
    """Its parts have the names of what is put into a corrected model."""

    def __init__(self, conv: str, norm: str, scale: str, head: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = (conv, norm, scale, head)
        self.add_module(conv, nn.Conv2d(3, 4, 1))
        self.add_module(norm, nn.BatchNorm2d(4))
        self.register_buffer(scale, torch.tensor(2.0))
        self.add_module(head, nn.Linear(4, 2))

    def forward(self, x):
        conv, norm, scale, head = (getattr(self, name) for name in self.names)
        return head((norm(conv(x)).relu() * scale).mean((2, 3)))


@every
@pytest.mark.parametrize(
    "names",
    [("combine", "placed", "readers", "report"), ("rule", "placed_at", "sites", "model"), ("a", "sites", "rule", "b")],
    ids=lambda names: " ".join(names),
)
def test_parts_with_the_names_of_corrections_are_the_models(names, rule):
    model, x = Names(*names).eval(), images(2) + 1
    robust = trueup.correct(model, trueup.calibrate(model, [images(24)], decide=False), rule)
    assert getattr(robust, names[3]).weight is getattr(model, names[3]).weight
    assert robust.get_submodule(names[0]).weight is model.get_submodule(names[0]).weight
    assert robust.get_buffer(names[2]) is model.get_buffer(names[2])
    assert list(robust.state_dict()) == list(model.state_dict())
    assert repr(rule) in repr(robust)
    assert not robust(x).equal(model(x))
    torch.testing.assert_close(torch.export.export(robust, (x,)).module()(x), robust(x))
    for twin in (pickle.loads(pickle.dumps(robust)), copy.deepcopy(robust)):
        assert twin(x).equal(robust(x))
        twin.load_state_dict(model.state_dict())
    emptied = torch.func.functional_call(robust, {names[2]: torch.tensor(0.0)}, (x,))
    assert emptied.equal(getattr(model, names[3]).bias.expand(2, -1))
