"""The answer in a model's output, and comparisons of two outputs: agreement of answers, movement of scores and odds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.graph import tensors_in

Answer = Callable[[Any], Tensor]


def most_likely(output: Any) -> Tensor:
    """Most likely class `(batch, ...)` in a model's output: scores `(batch, classes, ...)`.

    In a tuple, a dictionary or a dataclass, the scores are the first floating-point tensor with two dimensions or more.
    """
    scores = None if _are_boxes(output) else next((leaf for leaf in tensors_in(output) if _are_scores(leaf)), None)
    if scores is None:
        what = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ValueError(
            f"the model's output is {what}, not scores (batch, classes, ...); say what its answer is with "
            "answer=lambda output: ..., a tensor (batch, ...) to be compared"
        )
    found: Tensor = scores.argmax(dim=1)
    return found


def agreement(a: Tensor, b: Tensor) -> Tensor:
    """Share of each image's answer `(batch, ...)` that is the same in both: `(batch,)` float64."""
    return (a == b).reshape(len(a), -1).double().mean(dim=1)


def relative_change(before: Any, after: Any, images: int) -> Tensor:
    """Distance between outputs relative to the size of the first `(images,)` float64, over all `comparable` tensors.

    The mean over classes is subtracted from scores `(images, classes, ...)`: no answer depends on it. Scores that are
    infinite in both do not count, such as those of masked classes. NaN counts as moved by its whole size. Outputs that
    cannot be compared, such as lists of boxes, count as unmoved.

    >>> relative_change(torch.tensor([[1.0, -1.0]]), torch.tensor([[1.5, -0.5]]), 1)
    tensor([0.], dtype=torch.float64)
    >>> relative_change(torch.tensor([[1.0, -1.0]]), torch.tensor([[1.2, -1.2]]), 1)
    tensor([0.2000], dtype=torch.float64)
    """
    pairs = zip(comparable(before, images), comparable(after, images), strict=False)
    both = [(a, b) for a, b in pairs if a.shape == b.shape]
    if not both:
        return torch.zeros(images, dtype=torch.float64, device="cpu")
    infinite = [a.isinf() & (a == b) for a, b in both]  # masked classes
    size = torch.stack([_square(a, same) for (a, _), same in zip(both, infinite, strict=True)]).sum(dim=0)
    moved = torch.stack([_square(b - a, same) for (a, b), same in zip(both, infinite, strict=True)]).sum(dim=0)
    share = (moved / size.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()
    return torch.nan_to_num(share, nan=1.0, posinf=1.0)


def comparable(output: Any, images: int) -> list[Tensor]:
    """Tensors of an output whose numbers can be compared image by image: scores with a row per image.

    A list of boxes has none: another model may find other boxes, in another order.

    >>> [tuple(t.shape) for t in comparable({"out": torch.zeros(2, 3, 8, 8), "prototypes": torch.zeros(5, 3)}, 2)]
    [(2, 3, 8, 8)]
    >>> comparable([{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(2, 4)}], 2)
    []
    """
    if _are_boxes(output):
        return []
    return [leaf for leaf in tensors_in(output) if _are_scores(leaf) and len(leaf) == images]


def divergence(before: Any, after: Any) -> Tensor:
    """Mean Kullback-Leibler divergence `(batch,)` between the class probabilities of two outputs, differentiable.

    Takes the scores that `most_likely` takes, and averages over pixels.

    >>> divergence(torch.tensor([[2.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([0.])
    """
    wanted, found = (
        next(leaf for leaf in tensors_in(output) if _are_scores(leaf)).float().log_softmax(1)
        for output in (before, after)
    )
    each = (wanted.exp() * (wanted - found)).sum(dim=1)  # (batch, ...)
    return each.reshape(len(each), -1).mean(dim=1)


def _square(scores: Tensor, without: Tensor) -> Tensor:
    """Sum of squares per image of scores relative to their mean over classes, `without` some of the scores."""
    known = scores.double().masked_fill(without, 0)
    classes = (~without).sum(dim=1, keepdim=True).clamp(min=1)
    centred = (known - known.sum(dim=1, keepdim=True) / classes).masked_fill(without, 0)
    return centred.flatten(1).square().sum(dim=1).cpu()


def _are_boxes(output: object) -> bool:
    """Whether an output is a list with an entry per image: dictionaries, or tensors `(boxes, ...)`."""
    if not isinstance(output, list):
        return False
    rows = {len(entry) for entry in output if isinstance(entry, Tensor) and entry.dim()}
    return any(isinstance(entry, Mapping) for entry in output) or len(rows) > 1


def _are_scores(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and leaf.shape[1] > 1
