"""The forward pass of a watched model, with the modules of an instrument placed at its sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from trueup.graph.folds import refold, unfold
from trueup.graph.inputs import batch_of
from trueup.graph.watch import Watch
from trueup.targets import Site, Sites


class Instrument(Protocol):
    """The attributes of `Instrumented` that a watched pass uses."""

    _inner: nn.Module
    _placed: nn.ModuleList
    _placed_at: list[str]
    _readers: nn.ModuleList
    _combine: nn.Module | None
    _report: nn.Module | None
    _known: Sites
    _read_sites: list[str]
    _reported_sites: list[str]

    @property
    def _all_read(self) -> Sequence[str]: ...

    @property
    def _before_last_read(self) -> Sequence[str]: ...


def watched_pass(instrument: Instrument, watch: Watch, model: nn.Module | None = None) -> Callable[..., Any]:
    """Make a forward pass in which the value at each site passes through the module placed there.

    The first argument of the result is the instrument or a replica of it. `model` is the watched model, if that is not
    the instrument's own.
    """
    numbers = {name: number for number, name in enumerate(instrument._placed_at)}
    reads = {name: number for number, name in enumerate(instrument._all_read)}
    gate, reported = list(instrument._read_sites), list(instrument._reported_sites)
    folded = {site.name for site in instrument._known if site.folded and (site.name in numbers or site.name in reads)}
    early = set(instrument._before_last_read)

    def corrected(self: Instrument, *args: Any, **kwargs: Any) -> Any:
        batch = batch_of(*args, *kwargs.values()) if folded else None
        read: dict[str, Tensor] = {}
        value: list[Tensor] = []

        def visit(name: str, site: Site, a: Tensor) -> Tensor | None:
            if name not in numbers and name not in reads:
                return None
            seen, dim = a, site.channel_dim if site.kind == "norm" else None
            if name in folded:
                if not batch or a.shape[0] % batch:
                    return None
                seen = unfold(a, batch, dim)
            if name in reads:
                read[name] = self._readers[reads[name]](seen)
                if not value and self._combine is not None and all(known in read for known in gate):
                    value.append(self._combine(*[read[known] for known in gate]))
            # Control flow may have skipped a site that the correction depends on.
            if name not in numbers or (gate and name not in early and not value):
                return None
            out: Tensor = self._placed[numbers[name]](seen, *([] if name in early else value))
            return refold(out, a, dim) if name in folded else out

        output = watch(model if model is not None else self._inner, visit, *args, **kwargs)
        if self._report is None:
            return output
        if not all(known in read for known in reported) or (gate and not value):
            return output, None  # this pass skipped a site that the report reads
        return output, self._report(*[read[known] for known in reported], *value)

    return corrected
