"""`sites`: the names of the places that can be corrected."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from trueup.graph import Options, find
from trueup.probe import Probe


def sites(model: nn.Module, example: Tensor | None = None, **options: Unpack[Options]) -> list[str]:
    """The names of a model's sites, in the order of its forward pass.

    With an `example` batch the model is run once as well, which shows that it takes such images and that every site's
    first dimension is the batch.

    >>> sites(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()))
    ['1', '3']
    """
    if example is not None:
        return list(Probe(model, **options)(example, lambda _name, _a: None))
    return [site.name for site in find(model, **options)]
