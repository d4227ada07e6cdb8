"""A batch norm in one pass with what is placed there: where nothing can tell, and nowhere else."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import trueup
from architectures import make
from one_pass import BOTH, LEAST, NOTHING, SHUT, Block, apart, calibrated, corrected, dark, every


@pytest.fixture
def norms_are_folded(monkeypatch):
    """As on a GPU: elsewhere, a norm is done first, by torch, and nothing is rounded otherwise."""
    monkeypatch.setattr(sys.modules["trueup.kernels.realign"], "_takes_norms", lambda _: True)


def folded(robust):
    """Which sites' norms are done by what is placed there."""
    calls = [node for node in nodes_of(robust) if str(node.target).startswith("placed.")]
    return [robust.sites[int(str(node.target).removeprefix("placed."))] for node in calls if "norm" in node.kwargs]


def nodes_of(robust):
    """The nodes of a retrofitted module's graph, built once more."""
    graphs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fx.Graph, "lint", lambda self: graphs.append(self))
        copy.deepcopy(robust)
    return list(graphs[-1].nodes)


@every
def test_a_batch_norm_is_done_in_the_same_pass(rule, norms_are_folded):
    robust = corrected(make("resnet"), rule)
    reads = robust.reads if rule in (SHUT, LEAST) else []
    assert folded(robust) == [name for name in robust.sites if name not in reads]
    assert folded(apart(robust)) == []
    with torch.no_grad():
        assert robust(dark()).equal(apart(robust)(dark()))


def test_a_batch_norm_is_torchs_own_where_gradients_are_wanted(norms_are_folded):
    robust = corrected(make("resnet"), BOTH)
    weight = robust.model.get_submodule(robust.sites[-1]).weight
    found = torch.autograd.grad(robust(dark()).sum(), weight)[0]
    twin = apart(robust)
    weight = twin.model.get_submodule(robust.sites[-1]).weight
    assert found.equal(torch.autograd.grad(twin(dark()).sum(), weight)[0])
    assert found.any()


def test_a_batch_norm_that_is_folded_is_the_models(norms_are_folded):
    """Its weights may be loaded, moved and cast after the module was made."""
    model, other = make("resnet"), make("resnet")
    robust = corrected(model, BOTH)
    for module in other.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
    robust.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert not robust(dark()).equal(corrected(model, BOTH)(dark()))
        assert robust(dark()).equal(apart(robust)(dark()))
        assert robust.bfloat16()(dark().bfloat16()).dtype == torch.bfloat16


class Shared(nn.Module):
    """Norms of which something else reads, or writes, what they are given."""

    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.head, self.how = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1), how

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.how(self, self.conv(x)))


def overwritten(look):
    """What a norm was given is overwritten before the sum, by another name than the norm knows."""

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
        (lambda self, y: self.bn(y), True),
        (lambda self, y: self.bn(input=y), False),
        (lambda self, y: self.bn(y) + y, False),
        (lambda self, y: self.bn(y.flatten(2).unflatten(2, (30, 30))), True),
        (lambda self, y: self.bn(y.relu_()), True),
        (lambda self, y: self.bn(y) * self.bn.weight[:, None, None], True),
        (overwritten(torch.squeeze), False),
        (overwritten(torch.relu_), False),
        (overwritten(lambda y: y.mT), False),
        (overwritten(lambda y: F.dropout3d(y, training=False)), False),
        (overwritten_by_out, False),
    ],
    ids=[
        *("plain", "by name", "read", "a view", "in place", "weight is read"),
        *(
            "overwritten view",
            "overwritten, in place",
            "overwritten attribute",
            "overwritten, not dropped",
            "overwritten by out=",
        ),
    ],
)
def test_a_batch_norm_is_folded_only_if_nothing_else_touches_what_it_is_given(how, wanted, norms_are_folded):
    robust = corrected(Shared(how), BOTH)
    assert folded(robust) == (["bn"] if wanted else [])
    with torch.no_grad():
        assert robust(dark()).equal(apart(robust)(dark()))


class Doubled(nn.BatchNorm2d):
    """Something that a plain batch norm is not."""

    trueup_site = "norm"

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.SyncBatchNorm(4),
        Doubled(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_other_norms_are_not_folded(norm, norms_are_folded):
    model = Shared(lambda self, y: self.bn(y))
    model.bn = norm
    assert folded(corrected(model, BOTH)) == []


def test_a_norm_with_a_hook_is_not_folded(norms_are_folded):
    model, seen = Shared(lambda self, y: self.bn(y)), []
    model.bn.register_forward_hook(lambda _m, _i, out: seen.append(out))
    robust = corrected(model, BOTH)
    assert folded(robust) == []
    seen.clear()
    robust(dark())
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["bn", "relu"])
def test_a_module_with_a_forward_of_its_own_is_called(name):
    """As libraries that place the parts of a model on several devices give to each."""
    model = Block(lambda self, y, x: self.relu(y)).eval()
    targets, module = calibrated(model), model.get_submodule(name)
    module.forward = lambda x: 2 * type(module).forward(module, x)
    robust = trueup.correct(model, targets, NOTHING)
    assert folded(robust) == ([] if name == "bn" else ["bn"])
    assert robust(dark()).equal(model(dark()))


def test_a_batch_norm_without_a_bias_is_not_folded(norms_are_folded):
    model = Shared(lambda self, y: self.bn(y))
    model.bn.bias = None
    assert folded(corrected(model, BOTH)) == []


def take_the_batch(norm):
    norm.train()


def forget(norm):
    norm.running_mean = norm.running_var = None


def double(norm):
    norm.register_forward_hook(lambda _m, _i, out: 2 * out)


def widen(norm):
    norm.eps = torch.tensor(0.5).numpy()[()]  # a float of numpy's


@pytest.mark.parametrize("change", [take_the_batch, forget, double, widen])
@pytest.mark.parametrize("rule", [BOTH, NOTHING], ids=["both", "nothing"])
def test_a_batch_norm_that_is_folded_may_be_changed_later(change, rule, norms_are_folded):
    robust = corrected(Shared(lambda self, y: self.bn(y)), rule)
    twin, x = apart(robust), dark()
    before = robust(x)
    with torch.no_grad():
        for module in (robust, twin):
            change(module.model.bn)
        out = robust(x)
        assert out.equal(twin(x))
        assert not out.equal(before)
    assert robust.model.bn.num_batches_tracked == twin.model.bn.num_batches_tracked


def test_folded_norms_compile_and_export(norms_are_folded):
    robust = corrected(make("resnet"), BOTH)
    with torch.no_grad():
        wanted = robust(dark())
        exported = torch.export.export(robust, (dark(),)).module()
        torch.testing.assert_close(exported(dark()), wanted)
        compiled = torch.compile(robust, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(dark()), wanted)
    assert pickle.loads(pickle.dumps(robust))(dark()).equal(robust(dark()))
