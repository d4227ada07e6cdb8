"""`Site`: one place in a model. `Sites`: all of them, and how they were found."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import astuple, dataclass
from typing import Any, Literal, Self, get_args

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
    folded: whether the first dimension holds several rows per image, such as windows, image after image. All rows of an
        image are then corrected together.
    """

    name: str
    kind: Kind
    operation: str
    sparse: bool = False
    channel_dim: int = 1
    folded: bool = False


Select = Callable[[Site], bool]


def check_select(select: object) -> None:
    """Raise TypeError unless `select` is None or a predicate."""
    if select is not None and not callable(select):
        raise TypeError(
            f"select={select!r}: expected a predicate on a Site, such as select=lambda site: site.name in names, or "
            'select=lambda site: site.kind == "norm"'
        )


def listed(names: Collection[str]) -> str:
    """Return a few names as text, and how many others there are.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = list(names) if len(names) <= 4 else [*itertools.islice(names, 3)]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(shown) < len(names) else "")


class Sites(tuple[Site, ...]):
    """Sites in the order of the forward pass, and how they were found. Prints as a table.

    traced: whether the forward pass was traced. If not, the model runs as it is and its calls are watched.
    why: why it was not traced, and which calls cannot be seen.
    left: names of sites that are left alone, because their rows are not images.
    """

    traced: bool
    why: str
    left: tuple[str, ...]

    def __new__(
        cls, sites: Iterable[Site] = (), *, traced: bool = True, why: str = "", left: Iterable[str] = ()
    ) -> Self:
        self = super().__new__(cls, sites)
        self.traced, self.why, self.left = traced, why, tuple(left)
        return self

    def of(self, sites: Iterable[Site], *, left: Iterable[str] | None = None) -> Sites:
        """Sites with the same record of how they were found."""
        return Sites(sites, traced=self.traced, why=self.why, left=self.left if left is None else left)

    @property
    def note(self) -> str:
        """One or two sentences on how the sites were found and what is left alone; empty for an ordinary trace."""
        how = "" if self.traced else f"The model runs untraced, and its calls are watched: {self.why}."
        left = f"Left alone, because their rows are not images: {', '.join(self.left)}." if self.left else ""
        return " ".join(part for part in (how, left) if part)

    def __repr__(self) -> str:
        rows = [("site", "kind", "operation"), *((site.name, site.kind, site.operation) for site in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        table = [f"{name:{widths[0]}}  {kind:{widths[1]}}  {what}" for name, kind, what in rows]
        return "\n".join([*table, self.note] if self.note else table)

    def merged(self, other: Sites) -> Sites:
        """Sites of two calibrations of one model."""
        if not (self and other):
            return self or other
        mine, theirs = ({site.name: site for site in sites} for sites in (self, other))
        for name in mine.keys() & theirs.keys():
            if mine[name] != theirs[name]:
                raise ValueError(f"these targets cannot be added: the site {name!r} is {mine[name]} and {theirs[name]}")
        both = [*self, *(site for site in other if site.name not in mine)]
        left = dict.fromkeys([*self.left, *other.left])
        return Sites(both, traced=self.traced and other.traced, why=self.why or other.why, left=left)

    def to_json(self) -> str:
        """Text for a file's header."""
        rows = [astuple(site) for site in self]
        return json.dumps({"traced": self.traced, "why": self.why, "left": self.left, "sites": rows})

    @classmethod
    def from_json(cls, text: str) -> Sites:
        """Read what `to_json` wrote."""
        known = json.loads(text)
        sites = cls((_site(*row) for row in known["sites"]), **{k: known[k] for k in ("traced", "why", "left")})
        kinds = (type(known["traced"]), type(known["why"]), type(known["left"]))
        if kinds != (bool, str, list) or not _are_texts(sites.left) or len({site.name for site in sites}) < len(sites):
            raise TypeError(f"the record of sites is {text[:80]!r}")
        return sites


def _site(*row: Any) -> Site:
    site = Site(*row)
    texts = _are_texts((site.name, site.operation)) and site.kind in KINDS
    flags = {type(site.sparse), type(site.folded)} == {bool}
    if not texts or not flags or type(site.channel_dim) is not int or abs(site.channel_dim) > 64:
        raise TypeError(f"the record of a site is {row}")
    return site


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)
