"""Looking at the values at a model's sites without changing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trueup.graph.instrument import Instrumented
from trueup.graph.site import Site
from trueup.graph.trace import Trace, TraceError


class Probe:
    """Runs a traced model and shows the values at chosen sites.

    `probe(images, look)` runs the model once, in evaluation mode and without gradients, and returns what
    `look(site, a)` made of the activations `a` `(batch, ...)`, by the site's name. Images are moved to the model's
    device and never changed, even by a model that works in place.

    An activation whose first dimension is not the batch is an error; a norm whose first dimension is not is left out.
    The trace should own its buffers, because a model may count or average in them even in evaluation mode.
    """

    def __init__(self, trace: Trace, wanted: Callable[[Site], bool]) -> None:
        self._look: Callable[[Site, Tensor], Any] = lambda _site, _a: None
        self._seen: dict[Site, tuple[int, Any]] = {}
        self._batch = 0
        self.model = trace.model
        self.module = Instrumented(trace, lambda site: _Window(self, site) if wanted(site) else None)

    def __call__(self, images: Tensor, look: Callable[[Site, Tensor], Any]) -> dict[str, Any]:
        self._batch, self._look, self._seen = len(images), look, {}
        try:
            self._run(self.module, images)
            strange = {site.name: rows for site, (rows, _) in self._seen.items() if rows != len(images)}
            if strange:
                name, rows = next(iter(strange.items()))
                raise ValueError(
                    f"site {name!r} of {self._kind} has {rows} rows for {len(images)} images, so its first dimension "
                    f"is not the batch; leave such sites out with select=lambda site: site.name not in "
                    f"{sorted(strange)}"
                )
            return {site.name: value for site, (_, value) in self._seen.items()}
        finally:
            self._look, self._seen = lambda _site, _a: None, {}

    def checked(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the batches, after the first has shown that the traced model gives the model's outputs."""
        for number, images in enumerate(batches):
            if number == 0:
                traced, model = (self._run(module, images) for module in (self.module, self.model))
                if not _alike(traced, model):
                    raise TraceError(
                        f"{self._kind} gives other outputs than its traced forward pass: something in it changes from "
                        "call to call, or depends on the input in a way that cannot be traced (a random number, a "
                        "hook that changes values, a shape fixed at the first call); name the class of the module in "
                        "which that happens in leaves=(...)"
                    )
            yield images

    @property
    def _kind(self) -> str:
        return type(self.model).__name__

    def _run(self, module: nn.Module, images: Tensor) -> Any:
        try:
            with torch.inference_mode():
                return module(images.to(self.module.device, copy=True))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            hint = "" if images.is_floating_point() else "; convert integer images to floating point as in training"
            raise ValueError(
                f"{self._kind} does not take images of shape {tuple(images.shape)} and type {images.dtype}{hint}: "
                f"{error}"
            ) from error

    def _show(self, site: Site, a: Tensor) -> None:
        if site.kind == "activation" or (a.dim() > 1 and a.shape[0] == self._batch):
            self._seen[site] = a.shape[0], self._look(site, a)


class _Window(nn.Module):
    def __init__(self, probe: Probe, site: Site) -> None:
        super().__init__()
        self._probe, self._site = probe, site

    def forward(self, a: Tensor) -> Tensor:
        self._probe._show(self._site, a)
        return a


def _alike(a: Any, b: Any) -> bool:
    """Whether two outputs, however nested, hold the same tensors up to rounding."""
    ours, theirs = ([x for x in tree_leaves(output) if isinstance(x, Tensor)] for output in (a, b))
    return len(ours) == len(theirs) and all(
        x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-3, equal_nan=True)
        for x, y in zip(ours, theirs, strict=True)
    )
