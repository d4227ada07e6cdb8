"""What can be done in the same pass over memory as what is placed at a site: a batch norm, a sum, and then a relu.

That is a chain, of which the site may be the first or the last: a norm and what follows, or a relu and what leads up.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn

from trueup.graph.activations import KNOWN
from trueup.graph.memory import is_in_place
from trueup.graph.trace import HOOKS
from trueup.kernels import Norm

Order = Literal["value first", "residual first", "in place"]
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SUMS: dict[str, Collection[Any]] = {
    "call_function": (operator.add, operator.iadd, torch.add),
    "call_method": ("add", "add_"),
}


class Following(NamedTuple):
    """Nodes that a placed module can stand for, in their order, and the arguments that tell it to do what they do."""

    nodes: list[fx.Node]
    arguments: dict[str, Any]


def following(
    root: nn.Module,
    node: fx.Node,
    able: Collection[str],
    *,
    beside: Collection[fx.Node] = (),
    kept: Collection[fx.Node] = (),
) -> Following:
    """What a module that is `able` to "add", to "relu", or both, can do together with its own at a `node`.

    A value that anything else reads is not passed over, nor is a node that is to be `kept`. Those `beside` read the
    value of `node` itself in any case. A sum in place must be into the value: the memory of the residual is read
    elsewhere.
    """
    nodes: list[fx.Node] = []
    arguments: dict[str, Any] = {}
    user = _only_user(node, beside)
    if "add" in able and user is not None and user not in kept and (found := _residual(root, user, node)):
        nodes.append(user)
        arguments.update(residual=found[0], order=found[1])
        user = _only_user(user)
    if "relu" in able and user is not None and user not in kept and plain_activation(root, user) == "relu":
        nodes.append(user)
        arguments.update(activation="relu")
    return Following(nodes, arguments)


def leading(root: nn.Module, node: fx.Node, able: Collection[str]) -> tuple[fx.Node, Following]:
    """What a module that applies the plain activation of a `node` itself can do before that, and where that begins.

    Other sums than those with a batch norm would have to be read twice, and nothing be won by it.
    """
    value = node.all_input_nodes[0]
    for start in (value, *value.all_input_nodes):
        follows = following(root, start, able) if _is_norm(root, start) else Following([], {})
        if follows.nodes and follows.nodes[-1] is node:
            return start, follows
    return value, Following([node], {"activation": plain_activation(root, node)})


def can_be_later(root: nn.Module, node: fx.Node, call: fx.Node) -> bool:
    """Whether a node applies a batch norm that `norm_of` knows, and that can be done by a later `call` instead.

    So it must be all that reads what it is given. Nor may anything be written in place in the meantime: that may be
    the same memory by another name, and too much gives back what it is given to tell.
    """
    if not _is_norm(root, node) or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return False
    between = node.next
    while between is not call:
        if is_in_place(root, between) or "out" in between.kwargs:
            return False
        between = between.next
    return _only_user(node.args[0]) is node


def norm_of(module: nn.Module) -> Norm | None:
    """What a module does as it is now, if that is torch's own batch norm with running statistics; None for others."""
    if not isinstance(module, _BATCH_NORMS) or type(module) not in _BATCH_NORMS:  # a subclass may do more
        return None
    mean, variance, weight, bias = module.running_mean, module.running_var, module.weight, module.bias
    if module.training or not _is_plain(module) or mean is None or variance is None or weight is None or bias is None:
        return None
    return Norm(mean, variance, weight, bias, module.eps)


def add(value: Any, residual: Any, order: Order) -> Any:
    """The sum that a placed module stands for, by torch: its dtype, shape and layout may depend on the order."""
    if order == "in place":
        value += residual
        return value
    return residual + value if order == "residual first" else value + residual


def plain_activation(root: nn.Module, node: fx.Node) -> str | None:
    """The name of the activation function that a node applies, if it is torch's own and has no hooks."""
    for known in KNOWN:
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            if type(module) in known.modules and _is_plain(module):
                return known.name
        elif node.target in (known.functions if node.op == "call_function" else known.methods):
            return known.name
    return None


def _is_norm(root: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and norm_of(root.get_submodule(str(node.target))) is not None


def _is_plain(module: nn.Module) -> bool:
    """Whether it does what its class does: it has no hooks, nor a forward of its own."""
    return "forward" not in module.__dict__ and not any(getattr(module, hooks) for hooks in HOOKS)


def _only_user(node: fx.Node, beside: Collection[fx.Node] = ()) -> fx.Node | None:
    users = [user for user in node.users if user not in beside]
    return users[0] if len(users) == 1 else None


def _residual(root: nn.Module, node: fx.Node, value: fx.Node) -> tuple[fx.Node, Order] | None:
    """What a node adds to a value, and in which order, if that is all it does."""
    if node.target not in _SUMS.get(node.op, ()) or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return None
    if "get_attr" in (first.op, second.op):  # what is the same for all images lies as they do if there is but one
        return None
    if first is value:
        return second, "in place" if is_in_place(root, node) else "value first"
    return None if is_in_place(root, node) else (first, "residual first")
