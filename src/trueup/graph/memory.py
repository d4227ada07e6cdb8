"""In-place writes in a graph: which nodes write into memory that other nodes read."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from trueup.graph.activations import ACTIVATION_FUNCTIONS

# Operations that return their input or a view of it: writing into one writes into the other.
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_VIEW_METHODS = {
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "expand", "narrow"),
    *("select", "contiguous", "view_as", "t", "chunk", "split", "unbind", "detach", "to", "movedim", "swapaxes"),
    *("expand_as", "reshape_as", "ravel", "diagonal", "unfold", "moveaxis", "swapdims", "adjoint", "tensor_split"),
    *("split_with_sizes", "positive", "float", "half", "bfloat16", "double", "type", "type_as", "cpu", "cuda"),
}
_VIEW_FUNCTIONS = {
    *(operator.getitem, operator.pos, getattr, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout),
    *(F.feature_alpha_dropout, torch.dropout, torch.flatten, torch.unflatten, torch.ravel, torch.reshape),
    *(torch.transpose, torch.t, torch.adjoint, torch.permute, torch.movedim, torch.moveaxis, torch.swapaxes),
    *(torch.swapdims, torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, torch.tensor_split, torch.unbind),
    *(torch.narrow, torch.select, torch.diagonal, torch.detach, torch.positive, torch.real, torch.conj),
}
IN_PLACE_OPERATORS = {
    "__iadd__": operator.iadd,
    "__isub__": operator.isub,
    "__imul__": operator.imul,
    "__itruediv__": operator.itruediv,
    "__ifloordiv__": operator.ifloordiv,
    "__imod__": operator.imod,
    "__ipow__": operator.ipow,
    "__iand__": operator.iand,
    "__ior__": operator.ior,
    "__ixor__": operator.ixor,
}


def is_aliased(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node overwrites memory that anything besides its own result refers to."""
    if not is_in_place(model, node):
        return False
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if len(node.users) > 1 or node.op in ("placeholder", "get_attr"):
            return True
        if not (is_in_place(model, node) or _is_view(model, node)):
            return False
    return False


def is_repeatable(model: nn.Module, graph: fx.Graph) -> bool:
    """Whether a graph can run twice on one input: it writes neither into the input nor into the model's tensors.

    False if it calls modules or functions that are not torch's and were not traced: their effects are unknown.
    """
    return not any(_is_foreign(model, node) or _writes_outside(model, node) for node in graph.nodes)


def _is_foreign(model: nn.Module, node: fx.Node) -> bool:
    if node.op not in ("call_module", "call_function"):
        return False
    called = type(model.get_submodule(str(node.target))) if node.op == "call_module" else node.target
    package = (getattr(called, "__module__", None) or "torch").partition(".")[0]
    return package not in ("torch", "torchvision", "builtins", "operator", "_operator", "math")


def _writes_outside(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node writes into memory that exists before the graph runs."""
    if "out" in node.kwargs:
        return True
    if not is_in_place(model, node):
        return False
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if node.op in ("placeholder", "get_attr"):
            return True
        if not (is_in_place(model, node) or _is_view(model, node)):
            return False
    return False


def is_in_place(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node overwrites its input."""
    if node.op == "call_module":
        return getattr(model.get_submodule(str(node.target)), "inplace", False) is True
    if node.op not in ("call_method", "call_function"):
        return False
    return writes_in_place(node.target, node.args, node.kwargs)


def writes_in_place(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function, or of a method by its name, overwrites its first argument."""
    if isinstance(target, str):
        return target.endswith("_") and not target.endswith("__")
    flag = target in ACTIVATION_FUNCTIONS and any(argument is True for argument in args)
    named = getattr(target, "__name__", "")
    operators = target in IN_PLACE_OPERATORS.values()
    return flag or operators or named.endswith("_") or kwargs.get("inplace") is True


def _is_view(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), _VIEW_MODULES)
    return node.target in (_VIEW_METHODS if node.op == "call_method" else _VIEW_FUNCTIONS)
