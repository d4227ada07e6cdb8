"""Sites: where a forward pass applies an activation function or a norm; finding them, placing something there.

The only file that knows torch.fx. The forward pass is followed symbolically, so that a module called three times is
three sites and `F.relu` is as good as `nn.ReLU`; the result is plain Python again, which compiles and exports.
"""

from __future__ import annotations

import copy
import inspect
import operator
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from trueup.activations import KNOWN, KNOWN_FUNCTIONS, KNOWN_MODULES, Activation, Kind, declared_kind
from trueup.normalisations import KNOWN_NORMS, channel_dim, is_plain_norm

Predicate = Callable[["Site"], bool]


@dataclass(frozen=True)
class Site:
    """One place where an activation function, or a norm, is applied: its `kind`.

    `name` is the path of the module that applies it (and the function's name, for a function), and `#2`, `#3`, ...
    where the same path applies it again. `activation` is what is applied there, such as "relu" or "batch_norm";
    `sparse` says that zero is this activation's way of being silent, `channels` which dimension of a norm's output
    holds the channels.
    """

    name: str
    activation: str
    sparse: bool
    kind: Kind = "activation"
    channels: int = 1


class Options(TypedDict, total=False):
    """What `sites`, `calibrate`, `correct` and `measure` take alike, to choose the sites of a model.

    activations: module classes and functions of your own that are activation functions, beside the known ones (the
        ReLU, ELU and GELU families). A function must be called by a global name. Their zeros count as meant. A module
        class may instead declare itself by `trueup_site = True`; its zeros count as any other value. A norm of one's
        own, with the channels in the second dimension, says so by `trueup_site = "norm"`.
    select: a predicate; only sites for which it is true count. `site.kind` tells activations from norms.
    leaves: module classes to be called as they are, not looked into: the way out where a forward pass has control
        flow that cannot be followed. Activations inside a leaf are no sites.
    """

    activations: tuple[Activation, ...]
    select: Predicate | None
    leaves: tuple[type[nn.Module], ...]


class TraceError(RuntimeError):
    """A forward pass cannot be followed. The message says where, why, and what to do."""


def find(model: nn.Module, **options: Unpack[Options]) -> list[Site]:
    """The sites of a model, in the order of its forward pass."""
    return [place.site for place in _trace(clone(model).eval(), **options)[1]]


def clone(model: nn.Module, *, own_buffers: bool = False) -> nn.Module:
    """New module objects around the same parameters, and the same buffers unless it is to have its own.

    What torch.compile or a data-parallel module wraps is unwrapped.
    """
    while inner := _wrapped(model):
        model = inner
    if isinstance(model, Retrofit):
        raise TypeError("this module is a retrofitted one already; give the model that it was made from")
    shared = [*model.parameters(), *_loose_tensors(model), *(() if own_buffers else model.buffers())]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


class Retrofit(nn.Module):
    """A module like `model` in which the value of each site goes through `place(site)`, where that is not None.

    It shares the model's tensors but none of its module objects, so that neither can change the other's mode or
    structure, and has the model's `state_dict`, name by name. It is born in evaluation mode; in training mode it does
    what the model does. Moving or casting it leaves the model where it was. In evaluation mode, forward hooks on
    modules that contain others do not run.

    A placed module may offer to apply activation functions itself, by naming them in `fuses`, such as ("relu",). It is
    then given what comes before the activation, and activation="relu". That is done where nothing else can tell: the
    function is torch's own, has no hook when this module is made, and what it may overwrite is not read elsewhere.

    `model` is the model, `placed` what was placed, `sites` the names of where, in the order of the forward pass.
    """

    def __init__(self, model: nn.Module, place: Callable[[Site], nn.Module | None], **options: Unpack[Options]) -> None:
        super().__init__()
        self.model = clone(model).eval()
        graph, found = _trace(self.model, **options)
        modules = {site.name: module for site, *_ in found if (module := place(site)) is not None}
        self.sites = list(modules)
        self.placed = nn.ModuleList(modules.values())
        # What was selected is remembered by name: predicates are often lambdas, which cannot be pickled.
        self.options: Options = {**options, "select": None}
        self.register_state_dict_post_hook(_strip_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        self.eval()
        self._build(graph, found)

    @property
    def device(self) -> torch.device | None:
        """Where the model's first tensor is; None for a model without any."""
        return next((tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())), None)

    def _build(self, graph: fx.Graph, found: list[_Place]) -> None:
        """Turn the graph into this module's forward, with the placed modules in it."""
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = f"model.{node.target}"
        for site, node, aliased in found:
            if site.name in self.sites:
                number = self.sites.index(site.name)
                activation = _plain_activation(self, node)
                if not aliased and activation in getattr(self.placed[number], "fuses", ()):
                    _replace(graph, node, f"placed.{number}", activation)
                else:
                    _insert_after(graph, node, f"placed.{number}", aliased=aliased)
        graph.lint()
        corrected = type(fx.GraphModule(self, graph)).forward

        def forward(self: Retrofit, *args: Any, **kwargs: Any) -> Any:
            if self.training:
                return self.model(*args, **kwargs)
            return corrected(self, *args, **kwargs)

        signature = inspect.signature(type(self.model).forward)
        forward.__signature__ = signature  # type: ignore[attr-defined]  # torch.export names the inputs by it
        self.forward = MethodType(forward, self)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self._build(*_trace(self.model, **self.options))
        for module, mode in modes:
            module.training = mode

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Retrofit:
        # torch moves and casts parameters in place; shared ones would drag the model along.
        if any(fn(tensor) is not tensor for tensor in [*self.model.parameters(), *self.model.buffers()]):
            self.model = copy.deepcopy(self.model, {id(t): t for t in _loose_tensors(self.model)})
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def _replicate_for_data_parallel(self) -> Retrofit:
        replica: Retrofit = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.forward = MethodType(self.forward.__func__, replica)  # type: ignore[attr-defined]
        return replica


# Modules of torch.nn that apply an activation function in code that symbolic tracing cannot enter.
_OPAQUE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# What gives its input back, or a view of it: writing into one writes into the other.
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_VIEW_METHODS = {
    *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "expand", "narrow"),
    *("select", "contiguous", "view_as", "t", "chunk", "split", "unbind", "detach", "to", "movedim", "swapaxes"),
}
_VIEW_FUNCTIONS = {
    *(operator.getitem, F.dropout, F.dropout2d, torch.flatten, torch.reshape, torch.transpose, torch.permute),
    *(torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, torch.unbind, torch.movedim, torch.narrow),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_IN_PLACE_OPERATORS = {
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


class _Place(NamedTuple):
    """Where a site is in a graph. `aliased`: written in place, and what it overwrites can be read elsewhere."""

    site: Site
    node: fx.Node
    aliased: bool


class _Proxy(fx.Proxy):
    """Knows that `x += y` changes x itself; to fx's own proxies it is `x = x + y`, and other names keep the old."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[fx.Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name, _function in _IN_PLACE_OPERATORS.items():
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


def _trace(model: nn.Module, **options: Unpack[Options]) -> tuple[fx.Graph, list[_Place]]:
    """The graph of a model in evaluation mode, and its sites."""
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

    found: list[_Place] = []
    calls: Counter[str] = Counter()
    met = set()
    for node in graph.nodes:
        if (match := _recognise(model, node, classes, functions, leaves)) is None:
            continue
        path, known_as = match.site.name, match.given
        met.add(known_as)
        calls[path] += 1
        site = match.site if calls[path] == 1 else replace(match.site, name=f"{path}#{calls[path]}")
        found.append(_Place(site, node, _is_aliased(model, node)))
    for given in activations:
        if given not in met:
            raise ValueError(
                f"activations: {given.__name__} is never called in the forward pass of {type(model).__name__}, "
                "or, if it is a function, not by a global name"
            )
    select = options.get("select")
    return graph, [place for place in found if select is None or select(place.site)]


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


def _insert_after(graph: fx.Graph, node: fx.Node, target: str, *, aliased: bool) -> None:
    """Let everything that uses the value of `node` use what the module `target` makes of it."""
    with graph.inserting_after(node):
        placed = graph.call_module(target, (node,))
    if aliased:
        # What was written in place is read by other names as well: so is the correction.
        with graph.inserting_after(placed):
            graph.call_method("copy_", (node, placed))
    else:
        node.replace_all_uses_with(placed, delete_user_cb=lambda user: user is not placed)


def _replace(graph: fx.Graph, node: fx.Node, target: str, activation: str | None) -> None:
    """Let the module `target` do what an activation's `node` does, and its own."""
    with graph.inserting_after(node):
        placed = graph.call_module(target, (node.all_input_nodes[0],), {"activation": activation})
    node.replace_all_uses_with(placed)
    graph.erase_node(node)


def _plain_activation(root: nn.Module, node: fx.Node) -> str | None:
    """The name of the activation function that a node applies, if it is torch's own and has no hooks."""
    for known in KNOWN:
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            if type(module) in known.modules and not _has_hooks(module):
                return known.name
        elif node.target in (known.functions if node.op == "call_function" else known.methods):
            return known.name
    return None


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _is_aliased(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node overwrites memory that anything but its own result refers to."""
    if not _is_in_place(model, node):
        return False
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if len(node.users) > 1 or node.op in ("placeholder", "get_attr"):
            return True
        if not (_is_in_place(model, node) or _is_view(model, node)):
            return False
    return False


def _is_in_place(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return getattr(model.get_submodule(str(node.target)), "inplace", False) is True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    flag = node.target in KNOWN_FUNCTIONS and any(argument is True for argument in node.args)
    named = getattr(node.target, "__name__", "")
    operators = node.target in _IN_PLACE_OPERATORS.values()
    return flag or operators or named.endswith("_") or node.kwargs.get("inplace") is True


def _is_view(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), _VIEW_MODULES)
    return node.target in (_VIEW_METHODS if node.op == "call_method" else _VIEW_FUNCTIONS)


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
            for hooks in _HOOKS:
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


def _wrapped(model: nn.Module) -> nn.Module | None:
    """The model inside what torch.compile and the data-parallel modules make of it."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner: Any = model.module
    else:
        inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _loose_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that are plain attributes, such as the weights that weight norm works out: they cannot be copied."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]


def _strip_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Mapping[str, Any]) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}model.")]:
        state[prefix + key.removeprefix(f"{prefix}model.")] = state.pop(key)


def _add_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}model.{key.removeprefix(prefix)}"] = state.pop(key)


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
