"""Blocks in which a norm, a sum and a ReLU may follow each other, and modules to place there."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures import images
from trueup.graph import Instrumented, trace

FIRST, LAST, INTO = "value first", "residual first", "in place"  # of a value and what is added to it


class Change(nn.Module):
    """Changes the values at a site, and does its neighbours' work as a user would write it.

    `told` says what it was asked to do in its last call.
    """

    def __init__(self, site, fuses=("batch_norm", "add", "relu")) -> None:
        super().__init__()
        self.kind, self.fuses, self.told = site.kind, fuses, None

    def forward(self, a: Tensor, *given, norm=None, residual=None, order=FIRST, relu=False, ceiling=None) -> Tensor:
        self.told = told(norm=norm, residual=residual, order=order, relu=relu, ceiling=ceiling)
        a = a if norm is None else norm(a)
        a = a * 1.5 - 0.1 if self.kind == "norm" else a
        if residual is not None and order == INTO:
            a += residual
        elif residual is not None:
            a = residual + a if order == LAST else a + residual
        a = a.clamp(0, ceiling) if relu else a
        return a if self.kind == "norm" else a * 1.5 - 0.1


def told(*, norm=None, residual=None, order=FIRST, relu=False, ceiling=None, source=None):
    """Names of the steps that a placed module was asked to do, in order."""
    return (
        *(["norm"] if norm is not None else []),
        *([order] if residual is not None else []),
        *["relu" if ceiling is None else f"relu{ceiling:g}"] * relu,
    )


def instrumented(model, kind=None, **options):
    """The model with a `Change` at every site of a kind."""
    return Instrumented(trace(model, **options), lambda site: Change(site) if kind in (None, site.kind) else None)


def tasks(robust, x=None):
    """Steps of its neighbours that the module placed at each site takes over."""
    seen = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _i, options, _o, name=name: seen.update({name: told(**options)}), with_kwargs=True
        )
        for name, module in zip(robust.placed_at, robust.placed, strict=True)
    ]
    with torch.no_grad():
        robust(dark(2) if x is None else x)
    for hook in hooks:
        hook.remove()
    return seen


def apart(robust):
    """The same, with every norm, sum and ReLU where the model has it."""
    twin = copy.deepcopy(robust)
    for module in twin.placed:
        module.fuses = ()
    return copy.deepcopy(twin)  # a copy is built again


def dark(count=8):
    """Images unlike those of calibration."""
    return images(count, seed=3) * 0.3 - 1


class Block(nn.Module):
    """Two branches, of which the first ends in a norm, and what a model may do with them."""

    def __init__(self, follow, relu=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.other = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3)
        self.follow, self.relu, self.head = follow, relu or nn.ReLU(), nn.Conv2d(4, 2, 1)
        self.register_buffer("bias", torch.randn(4, 1, 1))
        nn.init.uniform_(self.bn.running_mean, -0.3, 0.3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.follow(self, self.bn(self.conv(x)), x))


class Shared(nn.Module):
    """A norm of which something else may read, or overwrite, the input."""

    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.head, self.how = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1), how
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.how(self, self.conv(x)))


class Downsampling(nn.Module):
    """A residual block whose two branches end in a norm, as torchvision writes it."""

    def __init__(self, add) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.downsample = nn.Sequential(nn.Conv2d(3, 8, 1, stride=2), nn.BatchNorm2d(8))
        self.relu, self.add, self.fc = nn.ReLU(inplace=True), add, nn.Linear(8, 10)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = self.add(out, self.downsample(x))
        return self.fc(self.relu(out).mean((2, 3)))


class Tokens(nn.Module):
    """A norm over the last dimension, and a residual around it, or a bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 6, 4, stride=4), nn.LayerNorm(6)
        self.bias = nn.Parameter(torch.randn(6)) if bias else None
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).permute(0, 2, 3, 1)
        return F.relu(self.norm(x) + (x if self.bias is None else self.bias))


class Loud(nn.ReLU):
    """Something that a plain ReLU is not."""

    def forward(self, x):
        return super().forward(x) * 2


class Unit(nn.Module):
    """An activation of one's own."""

    trueup_site = True

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=-0.1)


# What a model may do with the norm of its first branch, `y`, and its input `x`.


def iadd(self, y, x):
    y += self.other(x)
    return self.relu(y)


def iadd_to_the_other(self, y, x):
    r = self.other(x)
    r += y
    return self.relu(r)


def sum_is_read(self, y, x):
    z = y + self.other(x)
    return F.relu(z) + z


def sum_is_read_after_a_relu_in_place(self, y, x):
    z = y + self.other(x)
    return z.relu_() + z


def norm_is_read(self, y, x):
    return F.relu(y + self.other(x)) + y


def residual_first(self, y, x):
    before = self.other(x)
    return F.relu(before + y)


def residual_is_overwritten(self, y, x):
    r = self.other(x)
    z = y + r
    r.mul_(3)
    return F.relu(z) + r


def residual_is_overwritten_before_the_sum(self, y, x):
    r = self.other(x)
    r.mul_(3)
    return F.relu(y + r)


RELU, NEW = nn.ReLU, ("norm", "relu")
# How the block goes on; its ReLU; what is done together with a norm's correction; and with a ReLU's, at each ReLU.
CHAINS = {
    "relu": (lambda self, y, x: self.relu(y), None, ("relu",), [NEW]),
    "relu, in place": (lambda self, y, x: self.relu(y), RELU(inplace=True), ("relu",), [NEW]),
    "function": (lambda self, y, x: F.relu(y), None, ("relu",), [NEW]),
    "function, in place": (lambda self, y, x: F.relu(y, inplace=True), None, ("relu",), [NEW]),
    "method": (lambda self, y, x: y.relu(), None, ("relu",), [NEW]),
    "method, in place": (lambda self, y, x: y.relu_(), None, ("relu",), [NEW]),
    "relu, and relu again": (lambda self, y, x: F.relu(self.relu(y) - 0.1), None, ("relu",), [NEW, ("relu",)]),
    "sum": (lambda self, y, x: y + self.other(x), None, (FIRST,), []),
    "sum, then another activation": (lambda self, y, x: F.gelu(y + self.other(x)), None, (FIRST,), [()]),
    "sum and relu": (
        lambda self, y, x: self.relu(y + self.other(x)),
        None,
        (FIRST, "relu"),
        [("norm", FIRST, "relu")],
    ),
    "sum and relu, in place": (
        lambda self, y, x: (y + self.other(x)).relu_(),
        None,
        (FIRST, "relu"),
        [("norm", FIRST, "relu")],
    ),
    "residual first": (residual_first, None, (LAST, "relu"), [("norm", LAST, "relu")]),
    "sum in place": (iadd, RELU(inplace=True), (INTO, "relu"), [("norm", INTO, "relu")]),
    "torch.add": (
        lambda self, y, x: torch.add(y, self.other(x)).relu(),
        None,
        (FIRST, "relu"),
        [("norm", FIRST, "relu")],
    ),
    "method add": (lambda self, y, x: self.other(x).add(y).relu(), None, (LAST, "relu"), [("norm", LAST, "relu")]),
    "method add_": (lambda self, y, x: y.add_(self.other(x)).relu_(), None, (INTO, "relu"), [("norm", INTO, "relu")]),
    "sum of three": (lambda self, y, x: (y + self.other(x) + x[:, :1, 2:, 2:]).relu(), None, (FIRST,), [("relu",)]),
    "sum of three, the norm last": (
        lambda self, y, x: (self.other(x) + 1 + y).relu(),
        None,
        (LAST, "relu"),
        [("norm", LAST, "relu")],
    ),
    "a sum that is read": (sum_is_read, None, (FIRST,), [("relu",)]),
    "a sum that is read after a relu in place": (sum_is_read_after_a_relu_in_place, None, (FIRST,), [()]),
    "a residual that is overwritten": (
        residual_is_overwritten,
        None,
        (FIRST, "relu"),
        [("norm", FIRST, "relu")],
    ),
    "a residual that was overwritten": (
        residual_is_overwritten_before_the_sum,
        None,
        (FIRST, "relu"),
        [(FIRST, "relu")],
    ),
    "a residual to be broadcast": (
        lambda self, y, x: F.relu(y + x[:, :1, 2:, 2:]),
        None,
        (FIRST, "relu"),
        [("norm", FIRST, "relu")],
    ),
    "the same for all images": (lambda self, y, x: F.relu(y + self.bias), None, (), [("relu",)]),
    "one in double precision": (
        lambda self, y, x: F.relu(y + self.other(x).double()).float(),
        None,
        (FIRST, "relu"),
        [("norm", FIRST, "relu")],
    ),
    "in place, one in double": (
        lambda self, y, x: y.add_(self.other(x).double()).relu_(),
        None,
        (INTO, "relu"),
        [("norm", INTO, "relu")],
    ),
    "one in another layout": (
        lambda self, y, x: F.relu(self.other(x).to(memory_format=torch.channels_last) + y),
        None,
        (LAST, "relu"),
        [("norm", LAST, "relu")],
    ),
    "a number": (lambda self, y, x: F.relu(y + x.shape[1]), None, (FIRST, "relu"), [("norm", FIRST, "relu")]),
    "a number that is known": (lambda self, y, x: F.relu(y + 0.5), None, (), [("relu",)]),
    "a sum with itself": (lambda self, y, x: F.relu(y + y), None, (), [("relu",)]),
    "alpha": (lambda self, y, x: torch.add(y, self.other(x), alpha=0.5).relu(), None, (), [("relu",)]),
    "in place into the other": (iadd_to_the_other, None, (), [("relu",)]),
    "method add_ into the other": (lambda self, y, x: self.other(x).add_(y).relu_(), None, (), [("relu",)]),
    "a norm that is read": (norm_is_read, None, (), [("relu",)]),
    "a norm that is read beside its relu": (lambda self, y, x: F.relu(y) + y, None, (), [("relu",)]),
    "a norm with two relus": (lambda self, y, x: self.relu(y) - self.relu(-y), None, (), [("relu",), ("relu",)]),
    "a difference": (lambda self, y, x: F.relu(y - self.other(x)), None, (), [("relu",)]),
    "a subclass": (lambda self, y, x: self.relu(y), Loud(), (), [()]),
    "another activation": (lambda self, y, x: self.relu(y), nn.ReLU6(), (), [()]),
    "another, then a sum": (lambda self, y, x: F.silu(y) + self.other(x), None, (), [()]),
    "another, then a sum and a view": (
        lambda self, y, x: (F.gelu(y) + self.other(x)).flatten(2)[..., None],
        None,
        (),
        [()],
    ),
    "a relu, then a sum": (lambda self, y, x: F.relu(y) + self.other(x), None, ("relu",), [NEW]),
    "a sum of others": (lambda self, y, x: F.relu(self.other(x) + 1) + y, None, (LAST,), [("relu",)]),
    "a unit of one's own, then a sum": (lambda self, y, x: self.relu(y) + self.other(x), Unit(), (), [()]),
    "a view in between": (lambda self, y, x: y.flatten(2).relu().view(y.shape), None, (), [("relu",)]),
}
