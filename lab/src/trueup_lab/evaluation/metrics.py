"""Numbers made of predictions: accuracy, calibration error, corruption errors. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import torch
from torch import Tensor

from trueup_lab.evaluation.alexnet import ERRORS, EXTRA_ERRORS

BINS = 15


def accuracy(correct: Tensor) -> float:
    """The share of true entries, in percent.

    >>> accuracy(torch.tensor([True, True, False, True]))
    75.0
    """
    return 100 * int(correct.sum()) / len(correct)


def separation(low: Tensor, high: Tensor) -> float:
    """The area under the ROC curve, in percent: how often one of `high` lies above one of `low`, ties counting half.

    >>> separation(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
    87.5
    """
    ordered = low.double().sort().values
    below, upto = (torch.searchsorted(ordered, high.double().contiguous(), right=right) for right in (False, True))
    return 100 * float((below + upto).sum()) / (2 * len(low) * len(high))


def calibration_error(confidence: Tensor, correct: Tensor, *, bins: int = BINS) -> float:
    """The expected calibration error, in percent: how far confidence is from accuracy.

    `confidence` `(n,)` is the probability given to the predicted class, `correct` `(n,)` whether it was the right
    one. Images are put in `bins` equally wide bins by confidence, (k/bins, (k+1)/bins]; the error is the mean over
    images of |accuracy - mean confidence| of their bin (Guo et al., 2017).

    >>> calibration_error(torch.tensor([0.875, 0.875]), torch.tensor([True, False]))
    37.5
    """
    wide = confidence.double()
    which = (wide * bins).ceil().long().sub(1).clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64, device=wide.device).index_add_(0, which, correct.double() - wide)
    return round(100 * float(gap.abs().sum()) / len(wide), 6)


def corruption_errors(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Each corruption's CE: the error, mean over severities, in percent of AlexNet's.

    `accuracies`, by corruption, are means over the five severities, in percent.
    """
    baseline = {**ERRORS, **EXTRA_ERRORS}
    if unknown := [name for name in accuracies if name not in baseline]:
        raise ValueError(
            f"no error of AlexNet is published for {', '.join(unknown)}; there is for {', '.join(baseline)}"
        )
    return {name: (100 - value) / baseline[name] for name, value in accuracies.items()}


def mean_corruption_error(accuracies: Mapping[str, float], *, extra: bool = False) -> float:
    """The mCE, in percent: the mean of the 15 corruption errors; with `extra`, of all 19.

    `accuracies` may hold more corruptions than are used, and must hold all that are.
    """
    wanted = [*ERRORS, *EXTRA_ERRORS] if extra else [*ERRORS]
    return fmean(corruption_errors({name: _value(accuracies, name) for name in wanted}).values())


def relative_mean_corruption_error(
    accuracies: Mapping[str, float], clean: float, *, alexnet_clean: float, extra: bool = False
) -> float:
    """The relative mCE, in percent: how much corruption adds to the error, against what it adds to AlexNet's.

    `clean` and `alexnet_clean` are accuracies on clean images, in percent; the latter is for the caller to give, as
    AlexNets differ.
    """
    baseline = {**ERRORS, **EXTRA_ERRORS} if extra else ERRORS
    added = [
        (clean - _value(accuracies, name)) / (100 * error - (100 - alexnet_clean)) for name, error in baseline.items()
    ]
    return 100 * fmean(added)


def _value(accuracies: Mapping[str, float], name: str) -> float:
    if name not in accuracies:
        raise ValueError(f"the mCE is a mean over all its corruptions, and {name} is missing")
    return accuracies[name]
