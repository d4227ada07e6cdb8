"""Looking at what passes through a model's sites, without changing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from trueup.graph import Options, Site, retrofit


class Probe:
    """A model whose sites can be looked at.

    `probe(images, look)` runs the model once, in evaluation mode and without gradients, and returns what
    `look(name, a)` made of the activations `a` `(batch, ...)` at each site, by the site's name.
    """

    def __init__(self, model: nn.Module, **options: Unpack[Options]) -> None:
        self._look: Callable[[str, Tensor], Any] = lambda _name, _a: None
        self._seen: dict[str, Any] = {}
        self.module = retrofit(model, self._window, **options)
        if not self.module.sites:
            raise ValueError(
                f"{type(self.module.model).__name__} has no site: no activation function was found in its forward "
                "pass, or `select` chose none; name your own with activations=(MyActivation, my_function)"
            )
        tensors = (*self.module.parameters(), *self.module.buffers())
        self.device = tensors[0].device if tensors else None

    @property
    def model(self) -> nn.Module:
        """The model, as module objects of the probe's own around its tensors."""
        return self.module.model

    def __call__(self, images: Tensor, look: Callable[[str, Tensor], Any]) -> dict[str, Any]:
        self._look, self._seen = look, {}
        kind = type(self.model).__name__
        try:
            with torch.inference_mode():
                self.module(images.to(self.device))
        except RuntimeError as error:
            hint = "" if images.is_floating_point() else "; convert integer images to floating point as in training"
            raise ValueError(
                f"{kind} does not take images of shape {tuple(images.shape)} and type {images.dtype}{hint}: {error}"
            ) from error
        for name, (rows, _) in self._seen.items():
            if rows != len(images):
                raise ValueError(
                    f"site {name!r} of {kind} has {rows} rows for {len(images)} images: its first dimension is not the "
                    f"batch; leave it out with select=lambda site: site.name != {name!r}"
                )
        return {name: value for name, (_, value) in self._seen.items()}

    def _window(self, site: Site) -> nn.Module:
        return _Window(lambda a: self._seen.update({site.name: (a.shape[0], self._look(site.name, a))}))


class _Window(nn.Module):
    def __init__(self, show: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.show = show

    def forward(self, a: Tensor) -> Tensor:
        self.show(a)
        return a
