"""What a site is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["activation", "norm"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Site:
    """One place in a forward pass where an activation function or a norm is applied.

        trueup.correct(model, targets, select=lambda site: site.kind == "norm" and "layer4" not in site.name)

    name: path of the module that applies it (plus the function's name, for a function), and `#2`, `#3`, ... if the same
        path applies it again.
    kind: "activation", where `Correction` acts, or "norm", where `Evidence` acts.
    operation: what is applied, such as "relu" or "batch_norm".
    sparse: whether a zero means that the unit is off, as after a ReLU.
    channel_dim: dimension of a norm's output that holds the channels.
    """

    name: str
    kind: Kind
    operation: str
    sparse: bool = False
    channel_dim: int = 1


Select = Callable[[Site], bool]


class Sites(tuple[Site, ...]):
    """Sites in the order of the forward pass. Prints as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        rows = [("site", "kind", "operation"), *((site.name, site.kind, site.operation) for site in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{name:{widths[0]}}  {kind:{widths[1]}}  {what}" for name, kind, what in rows)
