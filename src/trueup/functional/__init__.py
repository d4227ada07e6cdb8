"""The mathematics as pure functions on tensors: the specification that every faster path is held to.

>>> import torch
>>> correct(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([10.0, 20.0, 30.0]), step=1.0, location="match")
tensor([[30., 10., 20.]])

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
