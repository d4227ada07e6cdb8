"""Symbolic tracing of a forward pass, and recognition of the sites in it.

A module that is called three times is three sites, and `F.relu` counts like `nn.ReLU`.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from trueup.graph.activations import ACTIVATION_MODULES, KNOWN_ACTIVATIONS, Activation, declared_kind
from trueup.graph.clone import clone
from trueup.graph.memory import IN_PLACE_OPERATORS, is_aliased
from trueup.graph.norms import KNOWN_NORMS, channel_dim, is_plain_norm
from trueup.graph.site import Site, Sites

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Modules of torch.nn that apply an activation function in code that symbolic tracing cannot enter.
_OPAQUE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class TraceError(RuntimeError):
    """A forward pass cannot be traced. The message says where, why, and what to do."""


class Place(NamedTuple):
    """A site and its node. `aliased`: the node writes in place into memory that is read elsewhere."""

    site: Site
    node: fx.Node
    aliased: bool


class Trace(NamedTuple):
    """The traced forward pass of `model`, a clone in evaluation mode, and all its sites."""

    model: nn.Module
    graph: fx.Graph
    places: list[Place]
    activations: tuple[Activation, ...]
    leaves: tuple[type[nn.Module], ...]

    @property
    def sites(self) -> Sites:
        """All sites in the order of the forward pass."""
        return Sites(place.site for place in self.places)

    def copy(self) -> tuple[fx.Graph, list[Place]]:
        """Copy of the graph, to be rewired, and its places."""
        graph = fx.Graph(tracer_cls=self.graph._tracer_cls)
        nodes: dict[fx.Node, fx.Node] = {}
        output: Any = graph.graph_copy(self.graph, nodes, return_output_node=True)
        if output is not None:
            graph.output(output[0])
        graph._codegen = self.graph._codegen
        return graph, [place._replace(node=nodes[place.node]) for place in self.places]


def trace(
    model: nn.Module,
    *,
    activations: tuple[Activation, ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
    own_buffers: bool = False,
) -> Trace:
    """Trace a clone of `model` in evaluation mode and find all its sites."""
    if not isinstance(activations, tuple) or not all(hasattr(a, "__name__") for a in activations):
        raise TypeError(f"activations={activations!r}: expected a tuple of module classes and functions")
    if not isinstance(leaves, tuple) or not all(isinstance(leaf, type) for leaf in leaves):
        raise TypeError(f"leaves={leaves!r}: expected a tuple of module classes")
    return retrace(clone(model, own_buffers=own_buffers).eval(), activations, leaves)


def retrace(model: nn.Module, activations: tuple[Activation, ...], leaves: tuple[type[nn.Module], ...]) -> Trace:
    """Trace a `model` that is a clone already, in evaluation mode."""
    classes = tuple(a for a in activations if isinstance(a, type))
    functions = tuple(a for a in activations if not isinstance(a, type))
    tracer = _Tracer((*classes, *leaves), functions)
    try:
        with _undisturbed(model, tracer):
            graph = tracer.trace(model, concrete_args=_flags(model))
    except Exception as error:
        raise TraceError(_why_not(model, error)) from error
    for node in graph.nodes:  # fx numbers the inputs that it fixes; callers know them by name
        if node.op == "placeholder" and node.target.rpartition("_")[0] in _flags(model):
            node.target = node.target.rpartition("_")[0]

    found: list[Place] = []
    calls: Counter[str] = Counter()
    met = set()
    for node in graph.nodes:
        if (match := _recognise(model, node, classes, functions, leaves)) is None:
            continue
        path, known_as = match.site.name, match.given
        met.add(known_as)
        calls[path] += 1
        site = match.site if calls[path] == 1 else replace(match.site, name=f"{path}#{calls[path]}")
        found.append(Place(site, node, is_aliased(model, node)))
    for given in activations:
        if given not in met:
            raise ValueError(
                f"activations: {given.__name__} is never called in the forward pass of {type(model).__name__}, "
                "or, if it is a function, not by a global name"
            )
    return Trace(model, graph, found, activations, leaves)


class _Proxy(fx.Proxy):
    """Records `x += y` as a change of x itself; fx's own proxies record `x = x + y`, and other names keep the old x."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name, _function in IN_PLACE_OPERATORS.items():
    setattr(_Proxy, _name, _in_place(_function))


class _Tracer(fx.Tracer):
    """Traces down to torch's own modules, activation modules and the requested leaves."""

    def __init__(self, whole: tuple[type[nn.Module], ...], functions: tuple[Callable[..., Any], ...]) -> None:
        super().__init__(autowrap_functions=functions, param_shapes_constant=True)
        self.whole = (*whole, *ACTIVATION_MODULES)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, self.whole) or is_plain_norm(m) or declared_kind(m) is not None
        return known or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _flags(model: nn.Module) -> dict[str, Any]:
    """Optional inputs that switch something on, fixed at their defaults: a trace must know what they switch."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is None or isinstance(p.default, bool | str)}


class _Match(NamedTuple):
    """A recognised site, named by its path, and which of the given activations it is, if any."""

    site: Site
    given: Activation | None = None


def _recognise(
    model: nn.Module,
    node: fx.Node,
    classes: tuple[type[nn.Module], ...],
    functions: tuple[Callable[..., Any], ...],
    leaves: tuple[type[nn.Module], ...],
) -> _Match | None:
    """The site at a node, or None."""
    if node.op == "call_module":
        path, module = str(node.target), model.get_submodule(str(node.target))
        # The most derived of the given classes: a subclass may be given beside its parent.
        if given := [c for c in classes if isinstance(module, c)]:
            known_as = max(given, key=lambda c: len(c.__mro__))
            return _Match(Site(path, "activation", known_as.__name__, sparse=True), known_as)
        if (kind := declared_kind(module)) is not None:
            return _Match(Site(path, kind, type(module).__name__))
        for known in KNOWN_ACTIVATIONS:
            if isinstance(module, known.modules):
                return _Match(Site(path, "activation", known.name, known.sparse))
        if is_plain_norm(module):
            return _norm(path, module, getattr(module, "normalized_shape", None))
        opaque = (*ACTIVATION_MODULES, *_OPAQUE)
        if not isinstance(module, leaves) and any(isinstance(m, opaque) for m in module.modules()):
            warnings.warn(
                f"the activation inside {path!r} ({type(module).__name__}) cannot be reached and is left alone",
                stacklevel=2,
            )
    elif node.op in ("call_function", "call_method"):
        for known in KNOWN_ACTIVATIONS:
            if node.target in (known.functions if node.op == "call_function" else known.methods):
                return _Match(Site(_path_of_function(node, known.name), "activation", known.name, known.sparse))
        for function in functions:
            if node.target is function:
                name = function.__name__
                return _Match(Site(_path_of_function(node, name), "activation", name, sparse=True), function)
        shape = node.kwargs.get("normalized_shape", node.args[1] if len(node.args) > 1 else None)
        return _norm("", node, shape)
    return None


def _norm(path: str, what: nn.Module | fx.Node, shape: Any) -> _Match | None:
    """The site of a norm: a module at a `path`, or a call of a function."""
    for known in KNOWN_NORMS:
        if isinstance(what, fx.Node):
            here, path = what.target in known.functions, _path_of_function(what, known.name)
        else:
            here = isinstance(what, known.modules)
        if here and (dim := channel_dim(known, shape)) is not None:
            return _Match(Site(path, "norm", known.name, channel_dim=dim))
    return None


def _path_of_function(node: fx.Node, name: str) -> str:
    callers = list(node.meta.get("nn_module_stack", {}).values())
    return f"{callers[-1][0]}.{name}" if callers and callers[-1][0] else name


@contextmanager
def _undisturbed(model: nn.Module, tracer: _Tracer) -> Iterator[None]:
    """Restore attributes and buffers after tracing, and run no hook during it.

    Hooks on modules that are traced into would see fx's proxies; hooks on leaves run where the leaf is called. Tensors
    that the forward pass creates become buffers of the model, so that they follow it to its device.
    """
    for name in [name for name in model._buffers if name.startswith("_tensor_constant")]:
        del model._buffers[name]  # of an earlier trace
    modules = list(model.named_modules())
    attributes = [(module, dict(vars(module))) for _, module in modules]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for name, module in modules:
        if not name or not tracer.is_leaf_module(module, name):
            for hooks in HOOKS:
                setattr(module, hooks, type(getattr(module, hooks))())
    try:
        yield
    finally:
        made = {key: value for key, value in vars(model).items() if key.startswith("_tensor_constant")}
        for module, before in attributes:
            module.__dict__.clear()
            module.__dict__.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for name, tensor in made.items():
            model.register_buffer(name, tensor, persistent=False)


def _why_not(model: nn.Module, error: Exception) -> str:
    """Say where the forward pass could not be traced, why, and the ways out."""
    kind, path, where = type(model).__name__, "", ""
    names = {id(module): name for name, module in model.named_modules()}
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, nn.Module) and id(module) in names and code.co_name == "forward":
            kind, path = type(module).__name__, names[id(module)]
            where = f", {code.co_filename}:{line}"
    way_out = (
        f"pass leaves=({kind},) to call {kind} as it is (activations inside it are then left alone)"
        if path
        else "move that part into a submodule of its own and name its class in leaves=(...)"
    )
    return (
        f"cannot trace the forward pass of {type(model).__name__}: in {path or 'its own forward'} ({kind}{where}): "
        f"{error}. Ways out: {way_out}; or use torch.where instead of `if`; or wrap a helper function with "
        "torch.fx.wrap"
    )
