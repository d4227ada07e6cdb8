"""Methods behind one protocol: the model as trained, the rules of trueup, and their rivals, one file per rival."""

from __future__ import annotations

import importlib
from typing import cast

from trueup_lab.evaluation.methods.aqr import Aqr
from trueup_lab.evaluation.methods.bn_batch import BatchStatistics
from trueup_lab.evaluation.methods.bn_mix import Mixed
from trueup_lab.evaluation.methods.correct_bn_mix import CorrectMixed
from trueup_lab.evaluation.methods.default import Default
from trueup_lab.evaluation.methods.iabn import InstanceAware
from trueup_lab.evaluation.methods.intent import Intent
from trueup_lab.evaluation.methods.memo import Memo
from trueup_lab.evaluation.methods.norms import has_batch_norm
from trueup_lab.evaluation.methods.pea import Pea
from trueup_lab.evaluation.methods.protocol import (
    Calibrating,
    Forgetful,
    Method,
    Needs,
    Network,
    as_method,
    is_continual,
)
from trueup_lab.evaluation.methods.quantile import ChannelQuantile
from trueup_lab.evaluation.methods.rules import Correct, Realign
from trueup_lab.evaluation.methods.spelling import read_fields
from trueup_lab.evaluation.methods.tent import Tent
from trueup_lab.evaluation.methods.uncorrected import Uncorrected
from trueup_lab.evaluation.methods.views import Views

__all__ = [
    "METHODS",
    "Aqr",
    "BatchStatistics",
    "Calibrating",
    "ChannelQuantile",
    "Correct",
    "CorrectMixed",
    "Default",
    "Forgetful",
    "InstanceAware",
    "Intent",
    "Memo",
    "Method",
    "Mixed",
    "Needs",
    "Network",
    "Pea",
    "Realign",
    "Tent",
    "Uncorrected",
    "Views",
    "as_method",
    "has_batch_norm",
    "is_continual",
    "parse_method",
]

METHODS: dict[str, type] = {
    kind.kind: kind
    for kind in (
        Uncorrected,
        Default,
        Correct,
        Realign,
        BatchStatistics,
        Mixed,
        CorrectMixed,
        InstanceAware,
        ChannelQuantile,
        Aqr,
        Intent,
        Views,
        Pea,
        Memo,
        Tent,
    )
}


def parse_method(text: str) -> Method:
    """Return the method of that name, or a user's own given as `package.module:NAME`.

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
            found = getattr(importlib.import_module(kind), rest)
            found = found() if isinstance(found, type) else found  # a class stands for its defaults
        except Exception as error:  # a user's module may raise anything when it is imported
            raise ValueError(f"no method {text!r}: {type(error).__name__}: {error}") from error
        if not (
            isinstance(getattr(found, "name", None), str)
            and isinstance(getattr(found, "needs", None), Needs)
            and callable(getattr(found, "prepare", None))
        ):
            raise ValueError(
                f"{text!r} is not a method but {type(found).__name__}: expected name, needs (a Needs) and "
                "prepare(model, targets), or a function made a method with trueup_lab.evaluation.as_method"
            )
        return cast("Method", found)
    raise ValueError(f"no method {text!r}; known: {', '.join(METHODS)}, or your own as package.module:NAME")
