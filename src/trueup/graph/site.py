"""What a site is, and how a caller chooses among a model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from torch import nn

from trueup.graph.activations import Activation, Kind

Predicate = Callable[["Site"], bool]


@dataclass(frozen=True)
class Site:
    """One place where an activation function, or a norm, is applied: its `kind`.

    `name` is the path of the module that applies it (and the function's name, for a function), and `#2`, `#3`, ...
    where the same path applies it again. `activation` is what is applied there, such as "relu" or "batch_norm";
    `sparse` says that zero is this activation's way of being silent, `channels` which dimension of a norm's output
    holds the channels.
    """

    name: str
    activation: str
    sparse: bool
    kind: Kind = "activation"
    channels: int = 1


class Options(TypedDict, total=False):
    """What `sites`, `calibrate`, `correct` and `measure` take alike, to choose the sites of a model.

    activations: module classes and functions of your own that are activation functions, beside the known ones (the
        ReLU, ELU and GELU families). A function must be called by a global name. Their zeros count as meant. A module
        class may instead declare itself by `trueup_site = True`; its zeros count as any other value. A norm of one's
        own, with the channels in the second dimension, says so by `trueup_site = "norm"`.
    select: a predicate; only sites for which it is true count. `site.kind` tells activations from norms. (The norms by
        which `Evidence` tells an unusual image are read in any case; reading changes nothing.)
    leaves: module classes to be called as they are, not looked into: the way out where a forward pass has control
        flow that cannot be followed. Activations inside a leaf are no sites.
    """

    activations: tuple[Activation, ...]
    select: Predicate | None
    leaves: tuple[type[nn.Module], ...]
