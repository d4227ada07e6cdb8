"""Read the values at a model's sites without changing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trueup.graph.cloning import device_of
from trueup.graph.inputs import Inputs
from trueup.graph.instrument import Instrumented
from trueup.graph.placed_module import PlacedModule
from trueup.graph.tracing import Trace
from trueup.targets import Site, listed


class Probe:
    """Runs a model and shows the values at chosen sites.

    `probe(inputs, look)` runs the model once, in evaluation mode and without gradients. It calls `look(site, a)` on the
    activations `a` `(batch, ...)` of each site, and returns the results by site name. `inputs` are images or `Inputs`;
    they are moved to the model's device and never changed, even by a model that works in place.

    A site whose first dimension is not the batch is an error: `examine` leaves such sites out of a trace. The trace
    should own its buffers, because a model may count or average in them even in evaluation mode.
    """

    def __init__(self, trace: Trace, wanted: Callable[[Site], bool]) -> None:
        self._look: Callable[[Site, Tensor], Any] = lambda _site, _a: None
        self._seen: dict[Site, tuple[int, Any]] = {}
        self.model = trace.model
        self.module = Instrumented(trace, lambda site: _Observer(self, site) if wanted(site) else None)

    def __call__(self, inputs: Tensor | Inputs, look: Callable[[Site, Tensor], Any]) -> dict[str, Any]:
        self._look, self._seen = look, {}
        batch = Inputs.of(inputs)
        try:
            run(self.module, batch, self.model)
            strange = {site.name: rows for site, (rows, _) in self._seen.items() if rows != len(batch)}
            if strange:
                name, rows = next(iter(strange.items()))
                raise ValueError(
                    f"site {name!r} of {type(self.model).__name__} has {rows} rows for {len(batch)} images, so its "
                    f"first dimension is not the batch; leave such sites out with select= ({listed(strange)})"
                )
            return {site.name: value for site, (_, value) in self._seen.items()}
        finally:
            self._look, self._seen = lambda _site, _a: None, {}

    def _show(self, site: Site, a: Tensor) -> None:
        self._seen[site] = a.shape[0], self._look(site, a)


class _Observer(PlacedModule):
    def __init__(self, probe: Probe, site: Site) -> None:
        super().__init__()
        self._probe, self._site = probe, site

    def forward(self, a: Tensor) -> Tensor:
        self._probe._show(self._site, a)
        return a


def run(module: nn.Module, inputs: Inputs, model: nn.Module) -> Any:
    """Run a module on a copy of the inputs, without gradients. Errors name the `model` and describe the inputs."""
    there = inputs.to(device_of(model))
    try:
        with torch.inference_mode():
            return there.run(module)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError) as error:
        hint = ""
        if (images := inputs.images) is not None:
            hint = "" if images.is_floating_point() else "; convert integer images to floating point as in training"
            hint += "; a single image needs a batch dimension: image[None]" if images.dim() == 3 else ""
        else:
            entry = next(iter(inputs.args[0]), None) if inputs.args and isinstance(inputs.args[0], dict) else None
            some = "..." if entry is None else f"batch[{entry!r}]"
            hint = f"; turn a batch into the model's arguments with transform=lambda batch: {some}"
        raise ValueError(f"{type(model).__name__} does not take {inputs.describe()}{hint}: {error}") from error
