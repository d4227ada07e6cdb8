"""Find the operations around a site that its module can fuse: a norm, a residual sum, and a ReLU or ReLU6.

The pattern is norm -> sum -> ReLU. The site is the first of these (a norm) or the last (a ReLU). The graph alone
decides here; `trueup.kernels.dispatch` decides whether the chain then runs as one kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from trueup.graph.activations import KNOWN_ACTIVATIONS
from trueup.graph.memory import is_in_place
from trueup.graph.trace import HOOKS
from trueup.kernels import BatchNorm, LayerNorm, Order

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SUMS: dict[str, Collection[Any]] = {
    "call_function": (operator.add, operator.iadd, torch.add),
    "call_method": ("add", "add_"),
}
_RELUS: dict[str, dict[str, Any]] = {"relu": {"relu": True}, "relu6": {"relu": True, "ceiling": 6.0}}


class Chain(NamedTuple):
    """Nodes that a placed module replaces, in order, and the arguments that tell it to do their work."""

    nodes: list[fx.Node]
    arguments: dict[str, Any]


def chain_after(
    root: nn.Module,
    node: fx.Node,
    fuses: Collection[str],
    *,
    readers: Collection[fx.Node] = (),
    kept: Collection[fx.Node] = (),
) -> Chain:
    """Find the sum and the ReLU after `node` that a module can fuse if it `fuses` "add", "relu" or "relu6".

    The chain ends at a value with a second user, and before a node in `kept`. `readers` of the value of `node` do not
    count as users. An in-place sum must write into the value, because the residual's memory is read elsewhere.
    """
    nodes: list[fx.Node] = []
    arguments: dict[str, Any] = {}
    user = _only_user(node, readers)
    if "add" in fuses and user is not None and user not in kept and (found := _residual(root, user, node)):
        nodes.append(user)
        arguments.update(residual=found[0], order=found[1])
        user = _only_user(user)
    name = None if user is None or user in kept else plain_activation(root, user)
    if user is not None and name in fuses and name in _RELUS:
        nodes.append(user)
        arguments.update(_RELUS[name])
    return Chain(nodes, arguments)


def chain_before(root: nn.Module, node: fx.Node, fuses: Collection[str]) -> tuple[fx.Node, Chain]:
    """Find the chain that ends in the plain ReLU `node`, and the node at which it starts.

    A sum is included only after a batch norm: fusing any other sum reads its inputs twice and gains nothing.
    """
    value = node.all_input_nodes[0]
    for start in (value, *value.all_input_nodes):
        chain = chain_after(root, start, fuses) if _is_batch_norm(root, start) else Chain([], {})
        if chain.nodes and chain.nodes[-1] is node:
            return start, chain
    return value, Chain([node], {"relu": True})


def can_defer_norm(root: nn.Module, node: fx.Node, call: fx.Node, fuses: Collection[str]) -> bool:
    """Whether the norm at `node` can be applied by the module that `call` calls, which `fuses` certain kinds of norm.

    If other nodes lie between the two, the norm must be the only user of its input, and none of those nodes may write
    in place: it could overwrite that input under another name.
    """
    norm = norm_of(root.get_submodule(str(node.target))) if node.op == "call_module" else None
    kind = "batch_norm" if isinstance(norm, BatchNorm) else "layer_norm"
    if norm is None or kind not in fuses:
        return False
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return False
    between = node.next
    if between is call:
        return True
    while between is not call:
        if is_in_place(root, between) or "out" in between.kwargs:
            return False
        between = between.next
    return _only_user(node.args[0]) is node


def norm_of(module: nn.Module) -> BatchNorm | LayerNorm | None:
    """Current values of torch's own batch norm, or layer norm over the last dimension; None for any other module."""
    if type(module) is not nn.LayerNorm:
        return batch_norm_of(module)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or bias is None or weight.dim() != 1 or not _is_plain(module):
        return None
    return LayerNorm(weight, bias, module.eps)


def batch_norm_of(module: nn.Module) -> BatchNorm | None:
    """Current values of torch's own batch norm in evaluation mode with running statistics; None for other modules."""
    if type(module) not in _BATCH_NORMS:  # a subclass may do more
        return None
    assert isinstance(module, _BATCH_NORMS)
    # Read from the dictionaries: each attribute lookup takes 0.7 microseconds, at every site of every forward pass.
    buffers, parameters = module._buffers, module._parameters
    mean, variance = buffers.get("running_mean"), buffers.get("running_var")
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if module.training or not _is_plain(module) or mean is None or variance is None or weight is None or bias is None:
        return None
    return BatchNorm(mean, variance, weight, bias, module.eps)


def plain_activation(root: nn.Module, node: fx.Node) -> str | None:
    """Name of the activation function that a node applies, if it is torch's own and has no hooks."""
    for known in KNOWN_ACTIVATIONS:
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            if type(module) in known.modules and _is_plain(module):
                return known.name
        elif node.target in (known.functions if node.op == "call_function" else known.methods):
            return known.name
    return None


def _is_batch_norm(root: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and batch_norm_of(root.get_submodule(str(node.target))) is not None


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has no hooks and no `forward` set on the object."""
    own = module.__dict__
    return "forward" not in own and not any([own.get(hooks) for hooks in HOOKS])  # noqa: C419  # faster


def _only_user(node: fx.Node, readers: Collection[fx.Node] = ()) -> fx.Node | None:
    users = [user for user in node.users if user not in readers]
    return users[0] if len(users) == 1 else None


def _residual(root: nn.Module, node: fx.Node, value: fx.Node) -> tuple[fx.Node, Order] | None:
    """The summand that `node` adds to `value`, and their order; None if the node is not a sum of the two."""
    if node.target not in _SUMS.get(node.op, ()) or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return None
    if "get_attr" in (first.op, second.op):  # a constant has an image's layout only in a batch of one
        return None
    if first is value:
        return second, "in place" if is_in_place(root, node) else "value first"
    return None if is_in_place(root, node) else (first, "residual first")
