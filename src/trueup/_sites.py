"""`sites`: the names of the places that can be corrected."""

from __future__ import annotations

from typing import Unpack, get_args

from torch import Tensor, nn

from trueup.graph.activations import Kind
from trueup.graph import Options, find
from trueup.graph.probe import Probe


def sites(
    model: nn.Module, example: Tensor | None = None, *, kind: Kind = "activation", **options: Unpack[Options]
) -> list[str]:
    """The names of a model's sites of one `kind`, in the order of its forward pass.

    "activation" is where an activation function is applied, and where a `Correction` acts; "norm" is where a
    normalisation layer is, and where `Evidence` is weighed.

    With an `example` batch the model is run once as well, which shows that it takes such images and that every site's
    first dimension is the batch; norms where it is not are left out.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    >>> sites(model), sites(model, kind="norm")
    (['2', '4'], ['1'])
    """
    if kind not in get_args(Kind):
        raise ValueError(f"sites(kind={kind!r}): want one of {', '.join(get_args(Kind))}")
    if example is not None:
        probe = Probe(model, kinds=(kind,), **options)
        return [name for name in probe(example, lambda _site, _a: None) if name in probe.selected]
    return [site.name for site in find(model, **options) if site.kind == kind]
