"""Metrics of predictions: accuracy, calibration error, intersection over union, corruption errors."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import torch
from torch import Tensor

from trueup_lab.evaluation.alexnet import ERRORS, EXTRA_ERRORS

BINS = 15


def accuracy(correct: Tensor) -> float:
    """Return the share of true entries, in percent.

    >>> accuracy(torch.tensor([True, True, False, True]))
    75.0
    """
    return 100 * int(correct.sum()) / len(correct)


def separation(low: Tensor, high: Tensor) -> float:
    """Return the area under the ROC curve in percent: how often one of `high` exceeds one of `low`, ties counting half.

    >>> separation(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
    87.5
    """
    ordered = low.double().sort().values
    below, upto = (torch.searchsorted(ordered, high.double().contiguous(), right=right) for right in (False, True))
    return 100 * float((below + upto).sum()) / (2 * len(low) * len(high))


def calibration_error(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> float:
    """Return the expected calibration error in percent.

    `confidence` `(n,)` is the probability given to the predicted class, `correct` `(n,)` whether that class
    is right. Images are sorted into `bins` equally wide bins by confidence, (k/bins, (k+1)/bins]; the error is the mean
    over images of |accuracy - mean confidence| of their bin (Guo et al., 2017).

    >>> calibration_error(torch.tensor([0.875, 0.875]), torch.tensor([True, False]))
    37.5
    """
    wide = confidence.double()
    which = (wide * bins).ceil().long().sub(1).clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64, device=wide.device).index_add_(0, which, correct.double() - wide)
    return round(100 * float(gap.abs().sum()) / len(wide), 6)


def mean_iou(intersection: Tensor, union: Tensor) -> Tensor:
    """Return the mean intersection over union of the classes that occur, `(...)` from counts `(..., classes)`.

    A class that is neither present nor predicted has an empty union, and does not count. Sum the counts over images
    first: the mean IoU of a set is not the mean over its images.

    >>> mean_iou(torch.tensor([1, 3, 0]), torch.tensor([2, 3, 0]))
    tensor(0.7500, dtype=torch.float64)
    """
    there = union > 0
    each = torch.where(there, intersection.double() / union.clamp(min=1), 0.0)
    return each.sum(dim=-1) / there.sum(dim=-1)


def corruption_errors(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Return the CE of each corruption: the mean error over severities, in percent of AlexNet's.

    `accuracies` by corruption are means over the five severities, in percent.
    """
    baseline = {**ERRORS, **EXTRA_ERRORS}
    if unknown := [name for name in accuracies if name not in baseline]:
        raise ValueError(f"no error of AlexNet is published for {', '.join(unknown)}; known: {', '.join(baseline)}")
    return {name: (100 - value) / baseline[name] for name, value in accuracies.items()}


def mean_corruption_error(accuracies: Mapping[str, float], *, extra: bool = False) -> float:
    """Return the mCE in percent: the mean of the 15 corruption errors, or of all 19 with `extra`.

    `accuracies` must hold all of them, and may hold more.
    """
    wanted = [*ERRORS, *EXTRA_ERRORS] if extra else [*ERRORS]
    return fmean(corruption_errors({name: _value(accuracies, name) for name in wanted}).values())


def _value(accuracies: Mapping[str, float], name: str) -> float:
    if name not in accuracies:
        raise ValueError(f"accuracies: {name} is missing; the mCE needs all its corruptions, so measure this one too")
    return accuracies[name]
