"""The answer in a model's output, and comparisons of two outputs: agreement of answers, movement of scores and odds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trueup.graph import tensors_in

Answer = Callable[[Any], Tensor]
Agreement = Callable[[Tensor, Tensor], Tensor]  # share of each image's answer that is the same

_SUM_TOLERANCE = 1e-3  # scores whose sum over classes is this near to 1 are probabilities
_SMALLEST_PROBABILITY = 1e-8  # stands for a probability of 0, whose logarithm is infinite
_FAR = 1000.0  # a score that is this far below an image's highest is that of a masked class, such as -1e4 or -1e9


def most_likely(output: Any) -> Tensor:
    """Most likely class `(batch, ...)` in a model's output: scores `(batch, classes, ...)`.

    In a tuple, a dictionary or a dataclass, the scores are the first floating-point tensor with two dimensions or more.
    """
    scores = _scores_in(output)
    if scores is None:
        what = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ValueError(
            f"the model's output is {what}, not scores (batch, classes, ...); say what its answer is with "
            "answer=lambda output: ..., a tensor (batch, ...) to be compared"
        )
    found: Tensor = scores.argmax(dim=1)
    return found


def agreement(a: Tensor, b: Tensor, background: int | None = None) -> Tensor:
    """Share of each image's answer `(batch, ...)` that is the same in both: `(batch,)` float64.

    Pixels that are `background` in both do not count. An image that has no others counts as wholly the same.

    >>> agreement(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 1]]))
    tensor([0.7500], dtype=torch.float64)
    >>> agreement(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 1]]), background=0)
    tensor([0.6667], dtype=torch.float64)
    """
    same = (a == b).reshape(len(a), -1)
    if background is None:
        return same.double().mean(dim=1)
    counted = ((a != background) | (b != background)).reshape(len(a), -1).double()
    total = counted.sum(dim=1)
    return torch.where(total > 0, (same * counted).sum(dim=1) / total.clamp(min=1), 1.0)


def relative_changes(before: Any, after: Any, images: int, answer: Answer = most_likely) -> Tensor:
    """Distance between outputs relative to the size of the first `(tensors, images)` float64, for each tensor compared.

    With the answer `most_likely`, the tensor that it reads is compared, and otherwise all `comparable` ones. The mean
    over classes is subtracted from scores `(images, classes, ...)`: no answer depends on it. Of probabilities, the
    logarithms are compared. Classes that are masked in both do not count: their score is minus infinity or, with the
    answer `most_likely`, far below another. NaN counts as moved by its whole size. There are no rows for outputs that
    cannot be compared, such as lists of boxes.

    >>> relative_changes(torch.tensor([[1.0, -1.0]]), torch.tensor([[1.5, -0.5]]), 1)
    tensor([[0.]], dtype=torch.float64)
    >>> relative_changes(torch.tensor([[1.0, -1.0]]), torch.tensor([[1.2, -1.2]]), 1)
    tensor([[0.2000]], dtype=torch.float64)
    """
    if answer is most_likely:
        found = (_scores_in(before), _scores_in(after))
        pairs = [] if found[0] is None or found[1] is None else [(_masked(found[0]), _masked(found[1]))]
    else:
        pairs = list(zip(comparable(before, images), comparable(after, images), strict=False))
    shares = [_relative_change(a, b) for a, b in pairs if a.shape == b.shape and len(a) == images]
    return torch.stack(shares) if shares else torch.zeros(0, images, dtype=torch.float64, device="cpu")


def comparable(output: Any, images: int) -> list[Tensor]:
    """Tensors of an output whose numbers can be compared image by image: those with a row per image.

    A single score per image or pixel counts as that of the second of two classes. A list of boxes has none: another
    model may find other boxes, in another order.

    >>> [tuple(t.shape) for t in comparable({"out": torch.zeros(2, 3, 8, 8), "prototypes": torch.zeros(5, 3)}, 2)]
    [(2, 3, 8, 8)]
    >>> [tuple(t.shape) for t in comparable(torch.zeros(2, 1), 2)]
    [(2, 2)]
    >>> comparable([{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(2, 4)}], 2)
    []
    """
    if _are_boxes(output):
        return []
    rows = [leaf for leaf in tensors_in(output) if _has_columns(leaf) and len(leaf) == images]
    return [leaf if leaf.shape[1] > 1 else torch.cat([torch.zeros_like(leaf), leaf], dim=1) for leaf in rows]


def divergence(before: Any, after: Any) -> Tensor:
    """Mean Kullback-Leibler divergence `(batch,)` between the class probabilities of two outputs, differentiable.

    Takes the scores that `most_likely` takes, and averages over pixels.

    >>> divergence(torch.tensor([[2.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([0.])
    """
    scores = [_scores_in(output) for output in (before, after)]
    probable = _are_probabilities(scores[0])
    wanted, found = (_logits(part, probable).float().log_softmax(1) for part in scores if part is not None)
    each = (wanted.exp() * (wanted - found)).sum(dim=1)  # (batch, ...)
    return each.reshape(len(each), -1).mean(dim=1)


def _relative_change(before: Tensor, after: Tensor) -> Tensor:
    """Distance per image `(images,)` float64, relative to the size of `before`; image by image, to save memory."""
    probable = _are_probabilities(before)
    rows = zip(_logits(before, probable), _logits(after, probable), strict=True)
    ratio = torch.stack([_moved(a, b) for a, b in rows]).cpu()
    still = ratio == 0  # the derivative of a root at 0 is infinite
    share = torch.where(still, 1.0, ratio).sqrt().masked_fill(still, 0)
    return torch.nan_to_num(share, nan=1.0, posinf=1.0)


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Squared distance between the scores `(classes, ...)` of an image over their squared size."""
    infinite = before.isinf() & (before == after)  # masked classes
    size, distance = _square(before, infinite), _square(after - before, infinite)
    return distance / size.clamp(min=torch.finfo(torch.float64).tiny)


def _masked(scores: Tensor) -> Tensor:
    """Scores `(batch, classes, ...)`, minus infinity for masked classes: beside -1e9, any change would seem small."""
    far = scores < scores.amax(dim=1, keepdim=True) - _FAR
    return scores.masked_fill(far, -torch.inf) if far.any() else scores


def _square(scores: Tensor, without: Tensor) -> Tensor:
    """Sum of squares of scores `(classes, ...)` relative to their mean over classes, `without` some of them."""
    known = scores.double().masked_fill(without, 0)
    classes = (~without).sum(dim=0, keepdim=True).clamp(min=1)
    centred = (known - known.sum(dim=0, keepdim=True) / classes).masked_fill(without, 0)
    return centred.square().sum()


def _are_probabilities(scores: Tensor | None) -> bool:
    """Whether scores are the result of a softmax. Its logarithm has the differences of the scores before it."""
    if scores is None or bool((scores < 0).any()):
        return False
    return bool(((scores.float().sum(dim=1) - 1).abs() < _SUM_TOLERANCE).all())


def _logits(scores: Tensor, probable: bool) -> Tensor:
    return scores.float().clamp(min=_SMALLEST_PROBABILITY).log() if probable else scores


def _scores_in(output: Any) -> Tensor | None:
    """Scores `(batch, classes, ...)` in an output, that `most_likely` reads; None if there are none."""
    if _are_boxes(output):
        return None
    return next((leaf for leaf in tensors_in(output) if _has_columns(leaf) and leaf.shape[1] > 1), None)


def _are_boxes(output: object) -> bool:
    """Whether an output is a list with an entry per image: dictionaries, or tensors `(boxes, ...)`."""
    if not isinstance(output, list):
        return False
    rows = {len(entry) for entry in output if isinstance(entry, Tensor) and entry.dim()}
    return any(isinstance(entry, Mapping) for entry in output) or len(rows) > 1


def _has_columns(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1
