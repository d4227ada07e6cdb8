"""Methods behind one protocol: the model as trained, the paper's correction, and its rivals."""

from __future__ import annotations

import importlib
from typing import cast

from trueup_lab.evaluation.methods.batch_norm import BatchStatistics, CorrectMixed, Mixed, has_batch_norm
from trueup_lab.evaluation.methods.plain import Correct, Realign, Uncorrected
from trueup_lab.evaluation.methods.protocol import Forgetful, Method, Needs, Network, as_method, is_continual
from trueup_lab.evaluation.methods.spelling import read_fields
from trueup_lab.evaluation.methods.tent import Tent

__all__ = [
    "METHODS",
    "BatchStatistics",
    "Correct",
    "CorrectMixed",
    "Forgetful",
    "Method",
    "Mixed",
    "Needs",
    "Network",
    "Realign",
    "Tent",
    "Uncorrected",
    "as_method",
    "has_batch_norm",
    "is_continual",
    "parse_method",
]

METHODS: dict[str, type] = {
    kind.kind: kind for kind in (Uncorrected, Correct, Realign, BatchStatistics, Mixed, CorrectMixed, Tent)
}


def parse_method(text: str) -> Method:
    """A method from its name, as in tables, or a user's own as `package.module:NAME`.

    >>> parse_method("bn-mix:prior=16")
    Mixed(prior=16)
    >>> parse_method("correct:lambda1=1.0,lambda2=0.2,location=match").step
    0.8
    """
    kind, _, rest = text.partition(":")
    if kind in METHODS:
        return cast("Method", METHODS[kind](**read_fields(METHODS[kind], rest)))
    if rest.isidentifier():
        try:
            return cast("Method", getattr(importlib.import_module(kind), rest))
        except (ImportError, AttributeError) as error:
            raise ValueError(f"no method {text!r}: {error}") from error
    raise ValueError(f"no method {text!r}; known: {', '.join(METHODS)}, or your own as package.module:NAME")
