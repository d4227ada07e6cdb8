"""Following a forward pass symbolically, and recognising the sites in it.

A module called three times is three sites, and `F.relu` is as good as `nn.ReLU`.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import fx, nn

from trueup.graph.activations import KNOWN, KNOWN_MODULES, Activation, declared_kind
from trueup.graph.memory import IN_PLACE_OPERATORS, is_aliased
from trueup.graph.site import Options, Site
from trueup.graph.norms import KNOWN_NORMS, channel_dim, is_plain_norm

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Modules of torch.nn that apply an activation function in code that symbolic tracing cannot enter.
_OPAQUE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class TraceError(RuntimeError):
    """A forward pass cannot be followed. The message says where, why, and what to do."""


class Place(NamedTuple):
    """Where a site is in a graph. `aliased`: written in place, and what it overwrites can be read elsewhere."""

    site: Site
    node: fx.Node
    aliased: bool


def trace(model: nn.Module, **options: Unpack[Options]) -> tuple[fx.Graph, list[Place]]:
    """The graph of a model in evaluation mode, and all its sites, selected or not."""
    if unknown := options.keys() - Options.__annotations__:
        raise TypeError(f"unknown option {min(unknown)!r}; known: {', '.join(Options.__annotations__)}")
    activations, leaves = options.get("activations", ()), options.get("leaves", ())
    if not isinstance(activations, tuple) or not all(hasattr(a, "__name__") for a in activations):
        raise TypeError(f"activations={activations!r}: want a tuple of module classes and functions")
    classes = tuple(a for a in activations if isinstance(a, type))
    functions = tuple(a for a in activations if not isinstance(a, type))
    tracer = _Tracer((*classes, *leaves), functions)
    try:
        with _undisturbed(model, tracer):
            graph = tracer.trace(model, concrete_args=_flags(model))
    except Exception as error:
        raise TraceError(_why_not(model, error)) from error
    for node in graph.nodes:  # fx numbers the inputs that it fixes, and callers know them by name
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
    return graph, found


class _Proxy(fx.Proxy):
    """Knows that `x += y` changes x itself; to fx's own proxies it is `x = x + y`, and other names keep the old."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name, _function in IN_PLACE_OPERATORS.items():
    setattr(_Proxy, _name, _in_place(_function))


class _Tracer(fx.Tracer):
    """Follows a forward pass down to torch's own modules, activation modules and the leaves asked for."""

    def __init__(self, whole: tuple[type[nn.Module], ...], functions: tuple[Callable[..., Any], ...]) -> None:
        super().__init__(autowrap_functions=functions, param_shapes_constant=True)
        self.whole = (*whole, *KNOWN_MODULES)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, self.whole) or is_plain_norm(m) or declared_kind(m) is not None
        return known or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _flags(model: nn.Module) -> dict[str, Any]:
    """Optional inputs that switch something on: fixed at their defaults, since what they switch must be known."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is None or isinstance(p.default, bool | str)}


class _Match(NamedTuple):
    """A node that is a site, named by its path; and which of the given activations it is, if any."""

    site: Site
    given: Activation | None = None


def _recognise(
    model: nn.Module,
    node: fx.Node,
    classes: tuple[type[nn.Module], ...],
    functions: tuple[Callable[..., Any], ...],
    leaves: tuple[type[nn.Module], ...],
) -> _Match | None:
    """What a node is, if it is a site; None for others."""
    if node.op == "call_module":
        path, module = str(node.target), model.get_submodule(str(node.target))
        # The most derived of the given classes: a subclass may be given beside its parent.
        if given := [c for c in classes if isinstance(module, c)]:
            known_as = max(given, key=lambda c: len(c.__mro__))
            return _Match(Site(path, known_as.__name__, True), known_as)
        if (kind := declared_kind(module)) is not None:
            return _Match(Site(path, type(module).__name__, False, kind))
        for known in KNOWN:
            if isinstance(module, known.modules):
                return _Match(Site(path, known.name, known.sparse))
        if is_plain_norm(module):
            return _norm(path, module, getattr(module, "normalized_shape", None))
        if not isinstance(module, leaves) and any(isinstance(m, (*KNOWN_MODULES, *_OPAQUE)) for m in module.modules()):
            warnings.warn(
                f"the activation inside {path!r} ({type(module).__name__}) cannot be reached and is no site",
                stacklevel=2,
            )
    elif node.op in ("call_function", "call_method"):
        for known in KNOWN:
            if node.target in (known.functions if node.op == "call_function" else known.methods):
                return _Match(Site(_path_of_function(node, known.name), known.name, known.sparse))
        for function in functions:
            if node.target is function:
                name = function.__name__
                return _Match(Site(_path_of_function(node, name), name, True), function)
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
        if here and (channels := channel_dim(known, shape)) is not None:
            return _Match(Site(path, known.name, False, "norm", channels))
    return None


def _path_of_function(node: fx.Node, name: str) -> str:
    callers = list(node.meta.get("nn_module_stack", {}).values())
    return f"{callers[-1][0]}.{name}" if callers and callers[-1][0] else name


@contextmanager
def _undisturbed(model: nn.Module, tracer: _Tracer) -> Iterator[None]:
    """Trace a model without a trace: attributes and buffers are afterwards what they were, and no hook is run.

    Hooks on modules that are looked into would see fx's proxies; those on leaves are called where the leaf is.
    Tensors that the forward pass makes become buffers of the model, so that they follow it to its device.
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
    """Says where the forward pass could not be followed, why, and the ways out."""
    kind, path, where = type(model).__name__, "", ""
    names = {id(module): name for name, module in model.named_modules()}
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, nn.Module) and id(module) in names and code.co_name == "forward":
            kind, path = type(module).__name__, names[id(module)]
            where = f", {code.co_filename}:{line}"
    way_out = (
        f"pass leaves=({kind},) to have {kind} called as it is (activations inside it are then no sites)"
        if path
        else "move that part into a submodule of its own and name its class in leaves=(...)"
    )
    return (
        f"cannot follow the forward pass of {type(model).__name__}: in {path or 'its own forward'} ({kind}{where}): "
        f"{error}. Ways out: {way_out}; or choose by torch.where instead of `if`; or wrap a helper function with "
        "torch.fx.wrap"
    )
