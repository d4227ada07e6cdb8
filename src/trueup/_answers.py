"""What a model answers: the part of its output that is compared for agreement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

Answer = Callable[[Any], Tensor]


def most_likely(output: Any) -> Tensor:
    """Most likely class `(batch, ...)` in a model's output: scores `(batch, classes, ...)`.

    If the output is a tuple or a dictionary, its first floating-point tensor with two dimensions or more counts.
    """
    scores = next((leaf for leaf in tree_leaves(output) if _are_scores(leaf)), None)
    if scores is None:
        what = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ValueError(
            f"the model's output is {what}, not scores (batch, classes, ...); say what its answer is with "
            "answer=lambda output: ..., a tensor (batch, ...) to be compared"
        )
    found: Tensor = scores.argmax(dim=1)
    return found


def agreement(a: Tensor, b: Tensor) -> Tensor:
    """Share of each image's answer `(batch, ...)` that is equal in both: `(batch,)` float64."""
    return (a == b).reshape(len(a), -1).double().mean(dim=1)


def _are_scores(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and leaf.shape[1] > 1
