"""Symbolic tracing of a forward pass, and recognition of the sites in it.

A module that is called three times is three sites, and `F.relu` counts like `nn.ReLU`. A model that cannot be traced
runs as it is and its calls are watched (`trueup.graph.watch`); its sites have the same names and meaning.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from trueup.graph.activations import ACTIVATION_MODULES, Activation
from trueup.graph.cloning import clone, modules_of
from trueup.graph.memory import IN_PLACE_OPERATORS, is_aliased
from trueup.graph.recognise import Known, Match, Numbering
from trueup.targets import Site, Sites

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Modules of torch.nn that apply an activation function in code that symbolic tracing cannot enter.
_OPAQUE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# Layers whose subclasses compute the same in another way: one that cannot be traced is called as it is.
_LAYERS = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.Embedding,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)


class TraceError(RuntimeError):
    """A forward pass cannot be followed, neither by tracing nor by watching its calls. The message says why.

        targets = trueup.calibrate(model, clean_loader, leaves=(Router,))   # call Router as it is
        robust = trueup.correct(model, targets, leaves=(Router,))

    Sites inside a leaf are left alone; all others are corrected.
    """


class Place(NamedTuple):
    """A site and its node. `aliased`: the node writes in place into memory that is read elsewhere.

    `channel_dim` is that of the node's value; a folded site has another one once it is unfolded.
    """

    site: Site
    node: fx.Node
    aliased: bool
    channel_dim: int | None


@dataclass(frozen=True)
class Trace:
    """The forward pass of `model`, a clone in evaluation mode, and all its sites.

    `graph` is None for a model that is watched; `places` are the sites in the graph.
    """

    model: nn.Module
    sites: Sites
    activations: tuple[Activation, ...]
    leaves: tuple[type[nn.Module], ...]
    graph: fx.Graph | None = None
    places: Sequence[Place] = ()

    def copy(self) -> tuple[fx.Graph, list[Place]]:
        """Copy the graph, to rewire it, and its places."""
        assert self.graph is not None
        graph = fx.Graph(tracer_cls=self.graph._tracer_cls)
        nodes: dict[fx.Node, fx.Node] = {}
        output: Any = graph.graph_copy(self.graph, nodes, return_output_node=True)
        if output is not None:
            graph.output(output[0])
        graph._codegen = self.graph._codegen
        return graph, [place._replace(node=nodes[place.node]) for place in self.places]

    def known(self, sites: Sites) -> Trace:
        """Return this trace with `sites` that were found before: which are folded, which are left alone."""
        if self.graph is None or not sites.traced:
            return self.watched(sites)
        found = {site.name: site for site in sites}
        places = [p._replace(site=found[p.site.name]) for p in self.places if p.site.name in found]
        return replace(self, places=places, sites=sites.of(place.site for place in places))

    def watched(self, sites: Sites) -> Trace:
        """Return a trace of this model that is watched instead of traced."""
        return Trace(self.model, sites, self.activations, self.leaves)


def trace(
    model: nn.Module,
    *,
    activations: tuple[Activation, ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
    own_buffers: bool = False,
    known: Sites = Sites(),  # noqa: B008  # immutable
) -> Trace:
    """Trace a clone of `model` in evaluation mode and find all its sites.

    If it cannot be traced, the result's sites say so and are those of its modules; `trueup.graph.examine` finds the
    others by running the model. `known` are the sites that a calibration of the model found, if there was one.
    """
    if not isinstance(activations, tuple) or not all(hasattr(a, "__name__") for a in activations):
        raise TypeError(f"activations={activations!r}: expected a tuple of module classes and functions")
    if not isinstance(leaves, tuple) or not all(isinstance(leaf, type) for leaf in leaves):
        raise TypeError(f"leaves={leaves!r}: expected a tuple of module classes")
    return retrace(clone(model, own_buffers=own_buffers).eval(), activations, leaves, known)


def retrace(
    model: nn.Module,
    activations: tuple[Activation, ...],
    leaves: tuple[type[nn.Module], ...],
    known: Sites = Sites(),  # noqa: B008
) -> Trace:
    """Trace a `model` that is already a clone in evaluation mode."""
    if not known.traced:
        return Trace(model, known, activations, leaves)
    try:
        traced = _symbolic(model, activations, leaves)
    except _NotTraceableError as error:
        if own := [a.__name__ for a in activations if not isinstance(a, type)]:
            raise TraceError(
                f"{error}. The model can run untraced, but the function {own[0]} (activations=) can only be found by "
                f"tracing: call it in a module of its own, and name that module's class in activations=(...); or pass "
                f"leaves=(...) with the class that cannot be traced"
            ) from error
        found = known if known else Sites(_of_modules(model, activations, leaves))
        return Trace(model, Sites(found, traced=False, why=str(error), left=found.left), activations, leaves)
    return traced.known(known) if known else traced


class _NotTraceableError(Exception):
    """Tracing failed; the message says why in a few words."""


def _symbolic(model: nn.Module, activations: tuple[Activation, ...], leaves: tuple[type[nn.Module], ...]) -> Trace:
    sites_of = Known(activations)
    tracer = _Tracer(sites_of, leaves)
    graph = None
    while graph is None:
        try:
            with _undisturbed(model, tracer):
                graph = tracer.trace(model, concrete_args=fixed_inputs(model))
        except Exception as error:
            module, where = _blame(model, error)
            layer = isinstance(module, _LAYERS) and not list(module.children()) and type(module) not in tracer.as_is
            if not layer:
                raise _NotTraceableError(f"{where} cannot be traced ({_first_line(error)})") from error
            tracer.as_is = (*tracer.as_is, type(module))
    for node in graph.nodes:  # fx appends a number to the inputs that it fixes; callers use their names
        if node.op == "placeholder" and node.target.rpartition("_")[0] in fixed_inputs(model):
            node.target = node.target.rpartition("_")[0]

    places: list[Place] = []
    numbering, met = Numbering(), set()
    for node in graph.nodes:
        match = _recognise(model, node, sites_of)
        if match is None and node.op == "call_module":
            _check_reach(model, str(node.target), leaves)
        if match is not None:
            met.add(match.given)
            dim = match.site.channel_dim if match.site.kind == "norm" else None
            places.append(Place(numbering.site(match.site), node, is_aliased(model, node), dim))
    check_met(model, activations, met)
    return Trace(model, Sites(place.site for place in places), activations, leaves, graph, places)


def check_met(model: nn.Module, activations: tuple[Activation, ...], met: set[Activation | None]) -> None:
    """Raise an error for an entry of `activations=` that the forward pass never calls."""
    for given in activations:
        if given not in met:
            raise ValueError(
                f"activations: {given.__name__} is never called in the forward pass of {type(model).__name__}, "
                "or, if it is a function, not by a global name"
            )


def _recognise(model: nn.Module, node: fx.Node, known: Known) -> Match | None:
    """The site at a node, or None."""
    if node.op == "call_module":
        return known.module(str(node.target), model.get_submodule(str(node.target)))
    if node.op not in ("call_function", "call_method"):
        return None
    callers = list(node.meta.get("nn_module_stack", {}).values())
    return known.function(callers[-1][0] if callers else "", node.target, node.args, node.kwargs)


def _of_modules(
    model: nn.Module, activations: tuple[Activation, ...], leaves: tuple[type[nn.Module], ...]
) -> Iterator[Site]:
    """Sites at modules, in the order of `named_modules`: all that is known without running the model."""
    known = Known(activations)
    inside: list[str] = []
    for path, module in nn.Module.named_modules(model):
        if any(path.startswith(outer) for outer in inside):
            continue
        if known.is_unit(module) or isinstance(module, leaves):
            inside.append(f"{path}.")
        if not isinstance(module, leaves) and (match := known.module(path, module)) is not None:
            yield match.site


def _check_reach(model: nn.Module, path: str, leaves: tuple[type[nn.Module], ...]) -> None:
    """Refuse to trace a module of torch.nn that applies an activation function inside: watching reaches that."""
    module = model.get_submodule(path)
    opaque = (*ACTIVATION_MODULES, *_OPAQUE)
    if not isinstance(module, leaves) and any(isinstance(m, opaque) for m in modules_of(module)):
        raise _NotTraceableError(f"tracing does not reach into {path!r} ({type(module).__name__})")


class _Proxy(fx.Proxy):
    """Records `x += y` as an in-place operation. fx's own proxies record `x = x + y`: other names keep the old x."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name, _function in IN_PLACE_OPERATORS.items():
    setattr(_Proxy, _name, _in_place(_function))


class _Tracer(fx.Tracer):
    """Traces down to torch's own modules, activation modules and the requested leaves."""

    def __init__(self, known: Known, leaves: tuple[type[nn.Module], ...]) -> None:
        super().__init__(autowrap_functions=known.functions, param_shapes_constant=True)
        self.known, self.leaves = known, leaves
        self.as_is: tuple[type[nn.Module], ...] = ()  # layers that cannot be traced and become leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = self.known.is_unit(m) or isinstance(m, self.leaves) or type(m) in self.as_is
        return whole or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def fixed_inputs(model: nn.Module) -> dict[str, Any]:
    """Optional inputs after the first, with the defaults at which tracing fixes them."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    return {p.name: p.default for p in parameters[1:] if p.default is None or isinstance(p.default, bool | str)}


def differ_from(
    fixed: Mapping[str, Any], inputs: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call gives any of the `fixed` inputs another value. `inputs` are the names of all inputs, in order."""
    given = {**dict(zip(inputs, args, strict=False)), **kwargs}
    return any(
        given[name] is not default and not (isinstance(given[name], bool | str) and given[name] == default)
        for name, default in fixed.items()
        if name in given
    )


@contextmanager
def _undisturbed(model: nn.Module, tracer: _Tracer) -> Iterator[None]:
    """Restore attributes and buffers after tracing, and run no hook during it.

    Hooks on modules that are traced into would see fx's proxies; hooks on leaves run where the leaf is called. Tensors
    that the forward pass creates become buffers of the model, so that they follow it to its device.
    """
    for name in [name for name in model._buffers if name.startswith("_tensor_constant")]:
        del model._buffers[name]  # left by an earlier trace
    modules = list(nn.Module.named_modules(model))
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


def _blame(model: nn.Module, error: Exception) -> tuple[nn.Module, str]:
    """Find the innermost module whose forward pass could not be traced, and describe it."""
    names = {id(module): name for name, module in nn.Module.named_modules(model)}
    found, where = model, f"the forward pass of {type(model).__name__}"
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, nn.Module) and id(module) in names and code.co_name == "forward":
            path = names[id(module)] or "its forward pass"
            found, where = module, f"{path} ({type(module).__name__}, {Path(code.co_filename).name}:{line})"
    return found, where


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
