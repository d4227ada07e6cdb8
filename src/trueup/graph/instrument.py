"""A model with modules placed at its sites, as plain Python that compiles and exports.

A traced model gets a new forward pass with the modules in it; any other model runs as it is and is watched.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from trueup import kernels
from trueup.graph.cloning import clone, device_of, loose_tensors, modules_of
from trueup.graph.fusion import Chain, can_defer_norm, chain_after, chain_before, plain_activation
from trueup.graph.hoist import function_of
from trueup.graph.memory import is_repeatable
from trueup.graph.overwrite import source_of
from trueup.graph.rewire import (
    allow_overwriting,
    call_before_output,
    combine_values,
    defer_norm,
    insert_after,
    insert_batch,
    insert_unfolded,
    read_values,
    replace_chain,
)
from trueup.graph.tracing import HOOKS, Place, Trace, differ_from, fixed_inputs, retrace
from trueup.graph.watch import Watch, unwatch
from trueup.graph.watched_pass import watched_pass
from trueup.graph.wrapper import LikeItsModel, strip_prefix
from trueup.targets import Site, listed


class Reading(NamedTuple):
    """A value computed during the forward pass from some `sites`, before the modules placed there change them.

    `reader(site)` is a module that reads one of the sites. `combine` computes the value from the readers' results, in
    the order of `sites`. `place_before(site)` is the module for a site before the last one that is read, where the
    value is not known yet, or None.
    """

    sites: Collection[str]
    reader: Callable[[Site], nn.Module]
    combine: nn.Module
    place_before: Callable[[Site], nn.Module | None] = lambda _: None


class Instrumented(LikeItsModel):
    """A module like the model, in which the value at each site passes through `place(site)` unless that is None.

    It shares the model's tensors but not its module objects, so neither can change the other's mode or structure. Its
    `state_dict` has the model's names. It starts in evaluation mode; in training mode it does what the model does.
    Moving or casting it leaves the model where it was. In evaluation mode, if the model was traced, forward hooks on
    modules that contain others do not run. If a call passes an optional input that differs from the traced default, the
    model is watched during that call.

    A placed module may offer, in `fuses`, to do its neighbours' work: "batch_norm", "layer_norm", "add", "relu" and
    "relu6". It is then called with the input of that chain and `norm=` (the module), `residual=`, `order=`, `relu=`
    and, for a ReLU6, `ceiling=`. Operations are fused only where nothing can tell the difference: they are torch's own,
    no other node reads the values in between, nothing is placed there, and no hook exists when this module is made.

    A placed module with `overwrites` is called with `source=`, the convolution that made its input, where no other
    operation reads that. It may then write into its input, after `is_unseen` has looked for hooks.

    With a `reading`, every placed module is called with two values: the value at its site and the reading. At
    sites before the last one that is read, `reading.place_before` is placed and called with one value.

    With a `report`, a second reading, the module returns `(output, value)`. Its `combine` gets the results of its
    readers and then, if there is a `reading`, the value of that. A site that both read is read once. In training mode
    the value is None.

    The value at a folded site is shown with all rows of an image side by side, the channels last.
    """

    is_instrumented = True
    placed_at: list[str]

    def __init__(
        self,
        trace: Trace,
        place: Callable[[Site], nn.Module | None],
        *,
        reading: Reading | None = None,
        report: Reading | None = None,
    ) -> None:
        super().__init__()
        self._inner = trace.model
        self._activations, self._leaves, self._known = trace.activations, trace.leaves, trace.sites
        self._read_sites = [] if reading is None else list(reading.sites)
        self._reported_sites = [] if report is None else list(report.sites)
        self._combine = None if reading is None else reading.combine
        self._report = None if report is None else report.combine
        self._readers = nn.ModuleList()
        before = self._before_last_read
        by_name = {site.name: site for site in trace.sites}
        for name in self._all_read:
            reads = reading if reading is not None and name in self._read_sites else report
            assert reads is not None
            self._readers.append(reads.reader(by_name[name]))
        modules = {}
        for site in trace.sites:
            put = reading.place_before if reading is not None and site.name in before else place
            if (module := put(site)) is not None:
                modules[site.name] = module
        self._placed_at = list(modules)
        self._watched_clone: tuple[list[Any], Callable[..., Any]] | None = None  # with the parts of the model
        self._placed = nn.ModuleList(modules.values())
        self.register_state_dict_post_hook(strip_prefix)  # type: ignore[no-untyped-call]
        self.eval()
        self._build(trace)

    @property
    def device(self) -> torch.device | None:
        """Device of the model."""
        return device_of(self._inner)

    @property
    def _all_read(self) -> list[str]:
        """Names of all sites that are read, in the order of the readers."""
        names = [site.name for site in self._known]
        read = list(dict.fromkeys([*self._read_sites, *self._reported_sites]))
        if missing := [name for name in read if name not in names]:
            reader = "gate" if missing[0] in self._read_sites else "report"
            raise ValueError(
                f"the {reader} reads the site {missing[0]!r}, which was not found in this "
                f"{type(self._inner).__name__}; it has {listed(names) or 'no sites'}; give the same activations= and "
                "leaves= as to calibrate"
            )
        return read

    @property
    def _before_last_read(self) -> list[str]:
        """Names of the sites before the last one that the first reading reads."""
        names, read = [site.name for site in self._known], [n for n in self._all_read if n in self._read_sites]
        return names[: max(map(names.index, read), default=0)]

    def _build(self, trace: Trace) -> None:
        """Build the forward pass and give it to this module."""
        quiet = trace.graph is not None and is_repeatable(self._inner, trace.graph)
        if trace.graph is None:
            corrected, fixed = watched_pass(self, Watch(self._inner, trace, self._functions, self._used)), {}
        else:
            corrected, fixed = self._rewired(*trace.copy()), fixed_inputs(self._inner)
        parameters = inspect.signature(self._inner.forward).parameters
        inputs = list(parameters)
        # Tracing assumes that the first input is given. The model decides what a call without it means.
        optional = trace.graph is not None and bool(inputs) and parameters[inputs[0]].default is None

        def forward(self: Instrumented, *args: Any, **kwargs: Any) -> Any:
            if self.training:
                output = self._inner(*args, **kwargs)
                return output if self._report is None else (output, None)
            missing = optional and (args[0] if args else kwargs.get(inputs[0])) is None
            if missing or (fixed and differ_from(fixed, inputs, args, kwargs)):
                return self._untraced()(self, *args, **kwargs)
            first = args[0] if args else kwargs.get(inputs[0]) if inputs else None
            run = functools.partial(corrected, self, *args, **kwargs)
            return kernels.compile_together(run, first, lambda: quiet and not _has_hooks(self._inner))

        self._give_forward(forward)

    @property
    def _functions(self) -> bool:
        """Whether any site in use is a function call."""
        paths = {path for path, _ in nn.Module.named_modules(self._inner)}
        return any(name.partition("#")[0] not in paths for name in self._used)

    @property
    def _used(self) -> list[str]:
        """Names of the sites where something is placed or read."""
        return [*self._placed_at, *self._all_read]

    def _untraced(self) -> Callable[..., Any]:
        """Watched forward pass on a clone: hooks on the model itself would prevent fusing in the traced pass.

        It is made again if the model has other parts by now.
        """
        parts = _parts(self._inner)
        known, run = self._watched_clone or ([], None)
        if run is None or len(parts) != len(known) or not all(map(operator.is_, parts, known)):
            twin = clone(self._inner)
            trace = Trace(twin, self._known, self._activations, self._leaves)
            run = watched_pass(self, Watch(twin, trace, self._functions, self._used), twin)
            self._watched_clone = parts, run
        return run

    def _rewired(self, graph: fx.Graph, places: list[Place]) -> Callable[..., Any]:
        """Compile the graph with the placed modules in it to a function of this module and the inputs."""
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = f"_inner.{node.target}"
        value: tuple[fx.Node, ...] = ()
        last = None
        batch = insert_batch(graph) if any(place.site.folded for place in places) else None
        by_name = {place.site.name: place for place in places}
        names, nodes, readers = self._all_read, [], []
        for place in (by_name[name] for name in names):
            nodes.append(insert_unfolded(graph, place, batch) if place.site.folded else place.node)
            readers += nodes[-1:] if place.site.folded else []
        calls = read_values(graph, nodes, "_readers")
        readers += calls
        read = dict(zip(names, calls, strict=True))
        if self._read_sites:
            value = (combine_values(graph, [read[name] for name in self._read_sites], "_combine"),)
            last = max((by_name[name].node for name in self._read_sites), key=list(graph.nodes).index)
        if self._reported_sites:
            call_before_output(graph, "_report", *(read[name] for name in self._reported_sites), *value)
        before = self._before_last_read
        chosen = [place for place in places if place.site.name in self._placed_at]
        kept = [place.node for place in chosen]
        for number, place in enumerate(chosen):
            site, node, aliased, _ = place
            target, module = f"_placed.{number}", self._placed[number]
            fuses = () if aliased or site.folded else getattr(module, "fuses", ())
            given = () if site.name in before else value
            start, chain = node, Chain([], {})
            if site.kind == "norm":
                chain = chain_after(self, node, fuses, readers=readers, kept=kept)
            elif not given and plain_activation(self, node) in fuses:
                start, chain = chain_before(self, node, fuses)
            if chain.nodes:
                call = replace_chain(graph, start, target, *given, chain=chain)
            else:
                # The module at the last site that is read must wait for the combined value.
                after = value[0] if given and node is last else node
                call = insert_after(graph, place, target, *given, after=after, readers=readers, batch=batch)
            if list(start.users) == [call] and can_defer_norm(self, start, call, fuses):
                defer_norm(graph, start, call)
            if getattr(module, "overwrites", False) and (source := source_of(self, call)) is not None:
                allow_overwriting(graph, source, call)
        graph.lint()
        return function_of(graph, self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watched_clone": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        unwatch(self._inner)
        modes = [(module, module.training) for module in modules_of(self._inner)]
        self._inner.eval()
        self._build(retrace(self._inner, self._activations, self._leaves, self._known))
        for module, mode in modes:
            module.training = mode

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Instrumented:
        # torch moves and casts parameters in place; shared ones would drag the model along.
        if any(fn(tensor) is not tensor for tensor in [*self._inner.parameters(), *self._inner.buffers()]):
            self._inner = copy.deepcopy(self._inner, {id(t): t for t in loose_tensors(self._inner)})
            self._watched_clone = None
            if not self._known.traced:
                unwatch(self._inner)
                self._build(Trace(self._inner, self._known, self._activations, self._leaves))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]


def _parts(model: nn.Module) -> list[Any]:
    """All modules, tensors and hooks of a model, and the modes of the modules."""
    modules = modules_of(model)
    modes = [module.training for module in modules]
    hooks = [hook for module in modules for kind in HOOKS for hook in getattr(module, kind).values()]
    return [*modules, *model.parameters(), *model.buffers(), *loose_tensors(model), *hooks, *modes]


def _has_hooks(model: nn.Module) -> bool:
    """Whether any module has a hook, which would notice that a forward pass runs twice."""
    return any(getattr(module, hooks) for module in modules_of(model) for hooks in HOOKS)
