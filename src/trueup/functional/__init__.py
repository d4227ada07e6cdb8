"""The mathematics as pure functions on tensors: the specification that every faster path is held to.

`paper`: 1-D optimal transport of a layer's activations. `evidence`: statistics of channels, and moving them back.
`gate`: how unusual a whole image is.
"""

from trueup.functional import evidence, gate, paper
from trueup.functional.paper import (
    as_rows,
    barycenter,
    correct,
    levels,
    order_statistics,
    quantile,
    spread,
    transport,
    wasserstein,
)

__all__ = [
    "as_rows",
    "barycenter",
    "correct",
    "evidence",
    "gate",
    "levels",
    "order_statistics",
    "paper",
    "quantile",
    "spread",
    "transport",
    "wasserstein",
]
