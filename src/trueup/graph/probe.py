"""Looking at what passes through a model's sites, without changing it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trueup.graph.activations import Kind
from trueup.graph import Options, Instrumented, Site, TraceError, clone


class Probe:
    """A model whose sites can be looked at.

    `probe(images, look)` runs the model once, in evaluation mode and without gradients, and returns what
    `look(site, a)` made of the activations `a` `(batch, ...)` at each site of these `kinds`, by the site's name. The
    images are moved to the model's device; they themselves are not changed, even by a model that works in place.

    A site whose first dimension is not the batch is an error, unless it is a norm: these are taken where they can be.

    `selected` are the names of the sites that the options choose. The `early` ones are the first third of all norms;
    they are looked at whether or not they are selected.
    """

    def __init__(
        self, model: nn.Module, *, kinds: tuple[Kind, ...] = ("activation",), **options: Unpack[Options]
    ) -> None:
        self._look: Callable[[Site, Tensor], Any] = lambda _site, _a: None
        self._seen: dict[Site, tuple[int, Any]] = {}
        self._kinds, self._batch = kinds, 0
        select = options.pop("select", None) or (lambda _site: True)
        met: list[Site] = []
        # Buffers of its own, because a model may count or average in them even in evaluation.
        self.module = Instrumented(clone(model, own_buffers=True), lambda site: self._window(site, met), **options)
        self.selected = [site.name for site in met if site.kind in kinds and select(site)]
        norms = [site for site in met if site.kind == "norm"]
        self.early = norms[: -(-len(norms) // 3)] if "norm" in kinds else []
        self._wanted = {*self.selected, *(site.name for site in self.early)}
        if not self.selected:
            what = " or ".join({"activation": "activation function", "norm": "norm"}[kind] for kind in kinds)
            raise ValueError(
                f"{self._kind} has no site: no {what} was found in its forward pass, or `select` chose "
                "none; name your own with activations=(MyActivation, my_function)"
            )

    @property
    def model(self) -> nn.Module:
        """The model, as module objects of the probe's own around its tensors."""
        return self.module.model

    @property
    def _kind(self) -> str:
        return type(self.model).__name__

    def __call__(self, images: Tensor, look: Callable[[Site, Tensor], Any]) -> dict[str, Any]:
        self._batch, self._look, self._seen = len(images), look, {}
        self._run(self.module, images)
        strange = {site.name: rows for site, (rows, _) in self._seen.items() if rows != len(images)}
        if strange:
            name, rows = next(iter(strange.items()))
            raise ValueError(
                f"site {name!r} of {self._kind} has {rows} rows for {len(images)} images: its first dimension is not "
                f"the batch; leave such sites out with select=lambda site: site.name not in {sorted(strange)}"
            )
        return {site.name: value for site, (_, value) in self._seen.items()}

    def checked(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The batches as they come, after the first has shown that the forward pass was followed faithfully."""
        for number, images in enumerate(batches):
            if number == 0:
                self._look = lambda _site, _a: None
                followed, model = (self._run(module, images) for module in (self.module, self.model))
                if not _alike(followed, model):
                    raise TraceError(
                        f"{self._kind} gives other outputs than its traced forward pass: something in it changes from "
                        "call to call, or depends on the input in a way that cannot be followed (a random number, a "
                        "hook that changes values, a shape fixed at the first call); name the class of the module in "
                        "which that happens in leaves=(...)"
                    )
            yield images

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

    def _window(self, site: Site, met: list[Site]) -> nn.Module | None:
        met.append(site)
        return _Window(lambda a: self._show(site, a)) if site.kind in self._kinds else None

    def _show(self, site: Site, a: Tensor) -> None:
        if site.name not in self._wanted:
            return
        if site.kind == "activation" or (a.dim() > 1 and a.shape[0] == self._batch):
            self._seen[site] = a.shape[0], self._look(site, a)


class _Window(nn.Module):
    def __init__(self, show: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.show = show

    def forward(self, a: Tensor) -> Tensor:
        self.show(a)
        return a


def _alike(a: Any, b: Any) -> bool:
    """Whether two outputs, however nested, hold the same tensors but for rounding."""
    ours, theirs = ([x for x in tree_leaves(output) if isinstance(x, Tensor)] for output in (a, b))
    return len(ours) == len(theirs) and all(
        x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-3, equal_nan=True)
        for x, y in zip(ours, theirs, strict=True)
    )
