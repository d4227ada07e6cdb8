"""`sites`: the places of a model that can be corrected."""

from __future__ import annotations

from torch import Tensor, nn

from trueup.graph import Activation, Probe, Select, Sites, trace


def sites(
    model: nn.Module,
    example: Tensor | None = None,
    *,
    select: Select | None = None,
    activations: tuple[Activation, ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
) -> Sites:
    """Sites of a model, in the order of its forward pass.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    >>> sites(model)
    site  kind        operation
    1     norm        batch_norm
    2     activation  relu
    4     activation  relu

    A site is a place where an activation function (`kind` "activation", where `Correction` acts) or a norm ("norm",
    where `Evidence` acts) is applied.

    example: a batch of images. The model is run once, which shows that it takes them and that every site's first
        dimension is the batch; norms where it is not are left out.
    select: keep only the sites for which this predicate is true.
    activations: module classes and functions of your own that are activation functions, beside the known ones (the
        ReLU, ELU and GELU families). A function must be called by a global name. Their zeros count as "off". A class
        may instead declare itself with `trueup_site = True`, and a norm, with the channels in the second dimension,
        with `trueup_site = "norm"`.
    leaves: module classes that are called as they are instead of being traced: the way out for control flow that
        cannot be traced. Sites inside a leaf are left alone.
    """
    traced = trace(model, activations=activations, leaves=leaves, own_buffers=example is not None)
    found = Sites(site for site in traced.sites if select is None or select(site))
    if example is None:
        return found
    seen = Probe(traced, lambda site: site in found)(example, lambda _site, _a: None)
    return Sites(site for site in found if site.name in seen)
