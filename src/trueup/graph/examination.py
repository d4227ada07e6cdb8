"""Check a trace on a first batch, and classify its sites: one row per image, several rows per image, or other."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trueup.graph.inputs import Inputs, tensors_in
from trueup.graph.instrument import Instrumented
from trueup.graph.probe import run
from trueup.graph.tracing import Trace, TraceError, check_met, differ_from, fixed_inputs
from trueup.graph.watch import Watch, unwatch
from trueup.targets import Site, Sites

_Values = dict[str, Tensor]


PROBE_IMAGES = 22  # a batch size that is unlikely to equal a number of windows, heads or positions


def examine(trace: Trace, inputs: Inputs) -> Trace:
    """Check a trace on a first batch, and return it with its sites classified. The trace should own its buffers.

    If the traced forward pass and the model disagree, the model is watched instead. A site with several rows per image,
    one image after the other, becomes a folded site. Sites with any other rows are removed and listed in `left`. Sites
    that do not depend on the image, such as those of a network that computes position biases, are dropped and not
    listed in `left`, because there is nothing to correct.

    This takes two forward passes of the batch and one of a single image. If the model accepts smaller batches, only the
    first images of a large batch are used.
    """
    images = inputs.images
    if images is not None and images.dim() > 3 and len(inputs) > PROBE_IMAGES:
        try:
            return _examined(trace, inputs.part(0, PROBE_IMAGES))
        except ValueError:  # a fixed batch size, or an error that the whole batch will show again
            pass
    return _examined(trace, inputs)


def _examined(trace: Trace, inputs: Inputs) -> Trace:
    survey = None if trace.graph is None else _Survey(trace)
    if survey is not None and (why := _trace_fault(trace, inputs, survey)):
        if own := [a.__name__ for a in trace.activations if not isinstance(a, type)]:
            raise TraceError(f"{why}, and the function {own[0]} (activations=) can only be found by tracing")
        trace = trace.watched(Sites(traced=False, why=why))
    if trace.graph is None:
        trace, survey = trace.watched(_discover(trace, inputs)), None
    survey = survey or _Survey(trace)
    irregular = survey.irregular(inputs)
    if not irregular:
        return trace
    folded, constant = survey.classify(inputs, irregular)
    sites = [_folded(site) if site.name in folded else site for site in trace.sites]
    kept = [site for site in sites if site.name not in irregular or site.name in folded]
    left = [site.name for site in sites if site.name in irregular and site.name not in (*folded, *constant)]
    return trace.known(trace.sites.of(kept, left=left))


def _trace_fault(trace: Trace, inputs: Inputs, survey: _Survey) -> str:
    """Reason why the traced forward pass and the model disagree on these inputs; empty if they agree."""
    kind = type(trace.model).__name__
    names = list(inspect.signature(trace.model.forward).parameters)
    if differ_from(fixed_inputs(trace.model), names, inputs.args, inputs.kwargs):
        return f"{kind} is called with optional inputs, but tracing fixes them at their defaults"
    own = run(trace.model, inputs, trace.model)
    try:
        traced = survey.record(inputs)
    except ValueError:  # the model runs, its trace does not
        return f"the traced forward pass of {kind} does not run on these inputs"
    if _alike(traced, own):
        return ""
    return (
        f"the outputs of {kind} differ from those of its traced forward pass: it changes from call to call, or depends "
        "on the input in a way that cannot be traced"
    )


def _discover(trace: Trace, inputs: Inputs) -> Sites:
    """Find all calls of known norms and activations in one forward pass."""
    found: list[Site] = []

    def visit(name: str, site: Site, _value: Tensor) -> None:
        found.append(replace(site, name=name))

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.watch = Watch(trace.model, trace, functions=True)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.watch(trace.model, visit, *args, **kwargs)

    try:
        run(Watched(), inputs, trace.model)
    finally:
        unwatch(trace.model)
    names = {site.operation for site in found}
    check_met(trace.model, trace.activations, {a for a in trace.activations if a.__name__ in names})
    return Sites(found, traced=False, why=trace.sites.why)


class _Survey:
    """Runs a model and records the number of rows at every site, and the values at some."""

    def __init__(self, trace: Trace) -> None:
        self._model, self._values, self._keep = trace.model, _Values(), set[str]()
        self._module = Instrumented(trace, lambda site: _Recorder(self, site.name))
        self._recorded: Inputs | None = None

    def store(self, name: str, a: Tensor) -> None:
        """Keep the value of a site in `keep`; of others, an empty tensor with as many rows."""
        self._values[name] = a.clone() if name in self._keep else a.new_empty(0).expand(a.shape[0], 0)

    def run(self, inputs: Inputs, keep: Collection[str] = ()) -> _Values:
        """Values at the sites in `keep`; at the others, empty tensors with the same number of rows."""
        if keep or inputs is not self._recorded:
            self.record(inputs, keep)
        return self._values

    def record(self, inputs: Inputs, keep: Collection[str] = ()) -> Any:
        """Run the model, store the values, and return the model's output."""
        self._values, self._keep = {}, set(keep)
        output = run(self._module, inputs, self._model)
        self._recorded = None if keep else inputs
        return output

    def irregular(self, inputs: Inputs) -> set[str]:
        """Names of the sites without one row per image, in this batch or in one of another size."""
        count = len(inputs)
        rows = {name: a.shape[0] for name, a in self.run(inputs).items()}
        irregular = {name for name, n in rows.items() if n != count}
        other = inputs.part(0, 1) if count > 1 else _with_another(inputs)
        try:
            again = self.run(other)
        except ValueError as error:
            images = inputs.images
            if images is None or images.dim() != 3:
                return irregular  # the model has a fixed batch size
            raise ValueError(
                f"{type(self._model).__name__} runs on images of shape {tuple(images.shape)} but not on one of their "
                f"{count} rows, so the first dimension does not count images; give a batch: image[None]"
            ) from error
        return irregular | {name for name in rows if name not in again or again[name].shape[0] != len(other)}

    def classify(self, inputs: Inputs, irregular: set[str]) -> tuple[set[str], set[str]]:
        """Names of the folded sites and of those that ignore the image. Runs two images together and each alone."""
        pair = inputs.part(0, 2) if len(inputs) > 1 else _with_another(inputs)
        try:
            both, first, second = (self.run(part, irregular) for part in (pair, pair.part(0, 1), pair.part(1, 2)))
        except ValueError:
            return set(), set()
        folded, constant = set(), set()
        for name in irregular & both.keys() & first.keys() & second.keys():
            a, b, c = both[name], first[name], second[name]
            if len(a) == len(b) + len(c) and len(b) == len(c) and _close(a, torch.cat([b, c])):
                folded.add(name)
            elif _close(a, b) and _close(a, c):
                constant.add(name)
        return folded, constant


class _Recorder(nn.Module):
    def __init__(self, survey: _Survey, name: str) -> None:
        super().__init__()
        self._survey, self._name = survey, name

    def forward(self, a: Tensor) -> Tensor:
        self._survey.store(self._name, a)
        return a


def _folded(site: Site) -> Site:
    """Mark a site as folded. Unfolded rows have their channels last."""
    return replace(site, folded=True, channel_dim=-1 if site.kind == "norm" else site.channel_dim)


def _with_another(inputs: Inputs) -> Inputs:
    """Add a second image to a batch of one: the first, mirrored and at half its values."""

    def double(value: Any) -> Any:
        if isinstance(value, Tensor):
            other = value.flip(-1) * 0.5 if value.is_floating_point() else value
            return torch.cat([value, other]) if value.dim() and value.shape[0] == 1 else value
        if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], Tensor):
            return [value[0], value[0].flip(-1) * 0.5]
        return {key: double(part) for key, part in value.items()} if isinstance(value, dict) else value

    return inputs.each(double)


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding, relative to the largest finite value."""
    if a.shape != b.shape or not a.is_floating_point():
        return a.shape == b.shape and a.equal(b)
    a, b = a.double(), b.double()
    sizes = a[a.isfinite()].abs()
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(sizes.max() if len(sizes) else 0.0), equal_nan=True)


def _alike(a: Any, b: Any) -> bool:
    """Whether two outputs, however nested, hold the same tensors up to rounding."""
    ours, theirs = list(tensors_in(a)), list(tensors_in(b))
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))
