"""Sites: the places in a forward pass where an activation function is applied; finding them, placing something there.

The only file that knows torch.fx. The forward pass is followed symbolically, so that a module called three times is
three sites and `F.relu` is as good as `nn.ReLU`; the result is plain Python again, which compiles and exports.
"""

from __future__ import annotations

import copy
import inspect
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

Predicate = Callable[["Site"], bool]
Activation = type[nn.Module] | Callable[..., Tensor]


@dataclass(frozen=True)
class Site:
    """One place where an activation function is applied.

    `name` is the path of the module that applies it (and the function's name, for a function), and `#2`, `#3`, ...
    where the same path applies it again. `sparse` says that zero is this activation's way of being silent.
    """

    name: str
    activation: str
    sparse: bool


class Options(TypedDict, total=False):
    """What `sites`, `calibrate`, `correct` and `measure` take alike, to choose the sites of a model.

    activations: module classes and functions of your own that are activation functions, beside the known ones.
    select: a predicate; only sites for which it is true count.
    leaves: module classes to be called as they are, not looked into: the way out where a forward pass has control
        flow that cannot be followed. Activations inside a leaf are no sites.
    """

    activations: tuple[Activation, ...]
    select: Predicate | None
    leaves: tuple[type[nn.Module], ...]


class TraceError(RuntimeError):
    """A forward pass cannot be followed. The message says where, why, and what to do."""


@dataclass(frozen=True)
class _Known:
    """An activation function in all its spellings."""

    name: str
    modules: tuple[type[nn.Module], ...]
    functions: tuple[Callable[..., Tensor], ...]
    methods: tuple[str, ...] = ()
    sparse: bool = False


_KNOWN = (
    _Known("relu", (nn.ReLU,), (F.relu, F.relu_, torch.relu, torch.relu_), ("relu", "relu_"), sparse=True),
    _Known("relu6", (nn.ReLU6,), (F.relu6,), sparse=True),
    _Known("leaky_relu", (nn.LeakyReLU,), (F.leaky_relu, F.leaky_relu_)),
    _Known("silu", (nn.SiLU,), (F.silu,)),
    _Known("gelu", (nn.GELU,), (F.gelu,)),
    _Known("hardswish", (nn.Hardswish,), (F.hardswish,)),
)
_IN_PLACE = {F.relu_, torch.relu_, F.leaky_relu_, "relu_"}
# Modules of torch.nn that apply an activation function in code that symbolic tracing cannot enter.
_OPAQUE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def find(model: nn.Module, **options: Unpack[Options]) -> list[Site]:
    """The sites of a model, in the order of its forward pass."""
    return [site for site, _ in _trace(clone(model).eval(), **options)[1]]


def retrofit(model: nn.Module, place: Callable[[Site], nn.Module | None], **options: Unpack[Options]) -> Retrofit:
    """A module like `model` in which the value of each site goes through `place(site)`, where that is not None.

    The result shares the model's tensors but none of its module objects, so that neither can change the other's mode
    or structure. It is returned in evaluation mode; in training mode it does what the model does.
    """
    return Retrofit(model, place, **options)


def clone(model: nn.Module) -> nn.Module:
    """New module objects around the same parameters and buffers. What torch.compile or DDP wrap is unwrapped."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


class Retrofit(nn.Module):
    """What `retrofit` returns. `model` is the model, `placed` what was placed, in the order of the forward pass.

    Its `state_dict` is the model's, name by name. Moving or casting it leaves the model where it was.
    """

    def __init__(self, model: nn.Module, place: Callable[[Site], nn.Module | None], **options: Unpack[Options]) -> None:
        super().__init__()
        self.model = clone(model).eval()
        graph, found = _trace(self.model, **options)
        modules = {site.name: module for site, _ in found if (module := place(site)) is not None}
        self.sites = list(modules)
        self.placed = nn.ModuleList(modules.values())
        # What was selected is remembered by name: predicates are often lambdas, which cannot be pickled.
        self.options: Options = {**options, "select": None}
        self.register_state_dict_post_hook(_strip_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        self.eval()
        self._build(graph, found)

    def _build(self, graph: fx.Graph, found: list[tuple[Site, fx.Node]]) -> None:
        """Turn the graph into this module's forward, with the placed modules in it."""
        for site, node in found:
            if site.name in self.sites:
                in_place = _is_in_place(self.model, node)
                _insert_after(graph, node, f"placed.{self.sites.index(site.name)}", in_place=in_place)
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr") and not str(node.target).startswith("placed."):
                node.target = f"model.{node.target}"
        graph.lint()
        corrected = type(fx.GraphModule(self, graph)).forward
        signature = inspect.signature(type(self.model).forward)

        def forward(self: Retrofit, *args: Any, **kwargs: Any) -> Any:
            if self.training:
                return self.model(*args, **kwargs)
            return corrected(self, *args, **kwargs)

        forward.__signature__ = signature  # type: ignore[attr-defined]  # torch.export names the inputs by it
        self.forward = MethodType(forward, self)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._build(*_trace(self.model, **self.options))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Retrofit:
        # torch moves and casts parameters in place; shared ones would drag the model along.
        if any(fn(tensor) is not tensor for tensor in [*self.model.parameters(), *self.model.buffers()]):
            self.model = copy.deepcopy(self.model)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def extra_repr(self) -> str:
        """In the way of torch's modules."""
        return f"sites={len(self.sites)}"


def _strip_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Mapping[str, Any]) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}model.")]:
        state[prefix + key.removeprefix(f"{prefix}model.")] = state.pop(key)


def _add_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}model.{key.removeprefix(prefix)}"] = state.pop(key)


class _Tracer(fx.Tracer):
    """Follows a forward pass down to torch's own modules, activation modules and the leaves asked for."""

    def __init__(self, whole: tuple[type[nn.Module], ...], functions: tuple[Callable[..., Any], ...]) -> None:
        super().__init__(autowrap_functions=functions, param_shapes_constant=True)
        self.whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self.whole) or declares_site(m) or super().is_leaf_module(m, module_qualified_name)


def declares_site(module: nn.Module) -> bool:
    """Whether a module's class says of itself that it is an activation function, by `trueup_site = True`."""
    return getattr(type(module), "trueup_site", False) is True


def _trace(
    model: nn.Module,
    activations: tuple[Activation, ...] = (),
    select: Predicate | None = None,
    leaves: tuple[type[nn.Module], ...] = (),
) -> tuple[fx.Graph, list[tuple[Site, fx.Node]]]:
    """The graph of a model in evaluation mode, and its sites with the nodes that they are."""
    classes = tuple(a for a in activations if isinstance(a, type))
    functions = tuple(a for a in activations if not isinstance(a, type))
    tracer = _Tracer((*classes, *leaves), functions)
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise TraceError(_why_not(model, error)) from error
    _keep_constants(model, graph)

    found: list[tuple[Site, fx.Node]] = []
    calls: Counter[str] = Counter()
    for node in graph.nodes:
        if (match := _recognise(model, node, classes, functions)) is None:
            continue
        path, activation, sparse = match
        calls[path] += 1
        name = path if calls[path] == 1 else f"{path}#{calls[path]}"
        found.append((Site(name, activation, sparse), node))
    met = {site.activation for site, _ in found}
    for activation_given in activations:
        if activation_given.__name__ not in met:
            raise ValueError(
                f"activations: {activation_given.__name__} is never called in the forward pass of "
                f"{type(model).__name__}, or not by a global name"
            )
    return graph, [(site, node) for site, node in found if select is None or select(site)]


def _recognise(
    model: nn.Module,
    node: fx.Node,
    classes: tuple[type[nn.Module], ...],
    functions: tuple[Callable[..., Any], ...],
) -> tuple[str, str, bool] | None:
    """The path, activation and sparsity of a node that is a site; None for one that is not."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if isinstance(module, classes) or declares_site(module):
            # A user's zeros may be meant; where they are not, an exact zero is rare enough not to matter.
            name = next((c.__name__ for c in classes if isinstance(module, c)), type(module).__name__)
            return str(node.target), name, isinstance(module, classes)
        if isinstance(module, _OPAQUE):
            warnings.warn(
                f"the activation inside {node.target!r} ({type(module).__name__}) cannot be reached and is no site",
                stacklevel=2,
            )
        for known in _KNOWN:
            if isinstance(module, known.modules):
                return str(node.target), known.name, known.sparse
    if node.op in ("call_function", "call_method"):
        for known in _KNOWN:
            if node.target in (known.functions if node.op == "call_function" else known.methods):
                return _path_of_function(node, known.name), known.name, known.sparse
        for function in functions:
            if node.target is function:
                return _path_of_function(node, function.__name__), function.__name__, True
    return None


def _path_of_function(node: fx.Node, name: str) -> str:
    stack = list(node.meta.get("nn_module_stack", {}))
    return f"{stack[-1]}.{name}" if stack and stack[-1] else name


def _insert_after(graph: fx.Graph, node: fx.Node, target: str, *, in_place: bool) -> None:
    """Let everything that uses the value of `node` use what the module `target` makes of it."""
    with graph.inserting_after(node):
        placed = graph.call_module(target, (node,))
    sources = [node]
    if in_place:
        # Whoever reads the input after an in-place activation means its output.
        sources += node.all_input_nodes[:1]
    later = set(_following(placed))
    for source in sources:
        source.replace_all_uses_with(placed, delete_user_cb=later.__contains__)


def _following(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _is_in_place(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return getattr(model.get_submodule(str(node.target)), "inplace", False) is True
    return node.target in _IN_PLACE or node.kwargs.get("inplace") is True or any(arg is True for arg in node.args)


def _keep_constants(model: nn.Module, graph: fx.Graph) -> None:
    """Tensors made in the forward pass become attributes of the model; as buffers they follow it to its device."""
    for node in graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and isinstance(vars(model).get(name), Tensor):
            model.register_buffer(name, vars(model).pop(name), persistent=False)


def _why_not(model: nn.Module, error: Exception) -> str:
    """Says where the forward pass could not be followed, why, and the ways out."""
    kind, path, where = type(model).__name__, "", ""
    names = {id(module): name for name, module in model.named_modules()}
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(module, nn.Module) and id(module) in names and code.co_name == "forward":
            kind, path = type(module).__name__, names[id(module)]
            where = f"{code.co_filename}:{line}"
    return (
        f"cannot follow the forward pass of {type(model).__name__}: in {path or 'its own forward'} ({kind}, {where}): "
        f"{error}. Ways out: pass leaves=({kind},) to have {kind} called as it is (activations inside it are then no "
        "sites); or choose by torch.where instead of `if`; or wrap a helper function with torch.fx.wrap"
    )
