"""A model with something placed at its sites: plain Python again, which compiles and exports."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, fx, nn

from trueup.graph.fusion import Following, can_be_later, following, leading, plain_activation
from trueup.graph.rewire import absorb, fold, insert_after, read
from trueup.graph.site import Options, Site
from trueup.graph.trace import Place, trace


def find(model: nn.Module, **options: Unpack[Options]) -> list[Site]:
    """The sites of a model, in the order of its forward pass."""
    return _selected(trace(clone(model).eval(), **options)[1], options)


def device_of(model: nn.Module) -> torch.device | None:
    """Where a model's first tensor is; None for a model without any."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)


def clone(model: nn.Module, *, own_buffers: bool = False) -> nn.Module:
    """New module objects around the same parameters, and the same buffers unless it is to have its own.

    What torch.compile or a data-parallel module wraps is unwrapped.
    """
    while inner := _wrapped(model):
        model = inner
    if isinstance(model, Instrumented):
        raise TypeError("this module is a retrofitted one already; give the model that it was made from")
    shared = [*model.parameters(), *_loose_tensors(model), *(() if own_buffers else model.buffers())]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


class Reader(NamedTuple):
    """A value made of what is at some sites, before what is placed there has changed it.

    `look(site)` is a module that makes something of what is at one of the `sites`, which need not be selected; `whole`
    makes the value of what all of these made, in the order of `sites`. `early(site)` is what is placed at a site that
    comes before the last of these, where the value is not known yet; None for nothing.
    """

    sites: Collection[str]
    look: Callable[[Site], nn.Module]
    whole: nn.Module
    early: Callable[[Site], nn.Module | None] = lambda _: None


class Instrumented(nn.Module):
    """A module like `model` in which the value of each site goes through `place(site)`, where that is not None.

    It shares the model's tensors but none of its module objects, so that neither can change the other's mode or
    structure, and has the model's `state_dict`, name by name. It is born in evaluation mode; in training mode it does
    what the model does. Moving or casting it leaves the model where it was. In evaluation mode, forward hooks on
    modules that contain others do not run.

    A placed module may offer to do what is at its site and around it, by naming it in `absorbs`: "batch_norm", "add",
    for the sum of that with another value, and "relu", after that or at once. Where the site is the norm, it does what
    follows; where it is the relu, what leads to it. It is then given what comes before all of that, and norm=, the
    module to apply, of which `graph.norm_of` may know what it does, residual= and order=, as `graph.add` takes them,
    and activation="relu". That is done where nothing else can tell: they are torch's own, nothing else reads what it
    passes over, nothing is placed there, and there is no hook when this module is made.

    With a `reader`, every placed module is called with two values: what passes its site, and what the reader made of
    the sites that it reads. Before the last of these, `reader.early` is placed, and called with one value; what it
    changes is read in later sites as changed.

    `model` is the model, `placed` what was placed, `sites` the names of where, in the order of the forward pass;
    `selected` are the names of all sites that could be chosen from.
    """

    def __init__(
        self,
        model: nn.Module,
        place: Callable[[Site], nn.Module | None],
        *,
        reader: Reader | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        self.model = clone(model).eval()
        graph, found = trace(self.model, **options)
        self.selected = [site.name for site in _selected(found, options)]
        self.reads = [] if reader is None else list(reader.sites)
        self.whole = None if reader is None else reader.whole
        self.looks = nn.ModuleList()
        chosen = [site for site, *_ in found if site.name in self.selected]
        placing = {site.name: place for site in chosen}
        if reader is not None:
            named = {site.name: site for site, *_ in found}
            early = self._early(found)
            self.looks.extend(reader.look(named[name]) for name in self.reads)
            placing |= {name: reader.early for name in placing if name in early}
        modules = {site.name: module for site in chosen if (module := placing[site.name](site)) is not None}
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
        """As `device_of` the model."""
        return device_of(self.model)

    def _last_read(self, found: list[Place]) -> int:
        """Which of the places is the last that is read."""
        names = [site.name for site, *_ in found]
        if missing := [name for name in self.reads if name not in names]:
            raise ValueError(
                f"the site {missing[0]!r} is to be read, and was not found in this {type(self.model).__name__}; it has "
                f"{', '.join(names) or 'no sites'}; give activations= and leaves= as you did to calibrate"
            )
        return max(names.index(name) for name in self.reads)

    def _early(self, found: list[Place]) -> list[str]:
        """The sites before the last that is read."""
        return [site.name for site, *_ in found[: self._last_read(found)]] if self.reads else []

    def _build(self, graph: fx.Graph, found: list[Place]) -> None:
        """Turn the graph into this module's forward, with the placed modules in it."""
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = f"model.{node.target}"
        value: tuple[fx.Node, ...] = ()  # that was read, for whoever is to have it
        looks: list[fx.Node] = []
        if self.reads:
            places = {site.name: node for site, node, _ in found}
            whole, looks = read(graph, [places[name] for name in self.reads], "looks", "whole")
            value = (whole,)
        # What is placed where the last is read waits until that is done; what comes before does not get it.
        last = found[self._last_read(found)].node if self.reads else None
        early = self._early(found)
        chosen = [place for place in found if place.site.name in self.sites]
        kept = [place.node for place in chosen]
        for site, node, aliased in chosen:
            number = self.sites.index(site.name)
            target, module = f"placed.{number}", self.placed[number]
            able = () if aliased else getattr(module, "absorbs", ())
            given = () if site.name in early else value
            start, follows = node, Following([], {})
            if site.kind == "norm":
                follows = following(self, node, able, beside=looks, kept=kept)
            elif not given and plain_activation(self, node) in able:
                start, follows = leading(self, node, able)
            if follows.nodes:
                call = absorb(graph, start, target, *given, follows=follows)
            else:
                after = value[0] if given and node is last else node
                call = insert_after(graph, node, target, *given, aliased=aliased, after=after, beside=looks)
            if "batch_norm" in able and list(start.users) == [call] and can_be_later(self, start, call):
                fold(graph, start, call)
        graph.lint()
        corrected = type(fx.GraphModule(self, graph)).forward

        def forward(self: Instrumented, *args: Any, **kwargs: Any) -> Any:
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
        self._build(*trace(self.model, **self.options))
        for module, mode in modes:
            module.training = mode

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Instrumented:
        # torch moves and casts parameters in place; shared ones would drag the model along.
        if any(fn(tensor) is not tensor for tensor in [*self.model.parameters(), *self.model.buffers()]):
            self.model = copy.deepcopy(self.model, {id(t): t for t in _loose_tensors(self.model)})
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def _replicate_for_data_parallel(self) -> Instrumented:
        replica: Instrumented = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.forward = MethodType(self.forward.__func__, replica)  # type: ignore[attr-defined]
        return replica


def _selected(found: list[Place], options: Options) -> list[Site]:
    select = options.get("select")
    return [site for site, *_ in found if select is None or select(site)]


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
