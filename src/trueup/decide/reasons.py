"""Reasons for which no setting can be shown to be safe, so that none is tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from trueup._distributed import gathered
from trueup.decide.pictures import digest
from trueup.decide.sample import MIN_DECISION_IMAGES
from trueup.rules.limits import images_needed

MOST_ALIKE = 0.9  # largest share of images, or pixels, with one answer from which settings can be judged

T = TypeVar("T")


class Declined(Exception):  # noqa: N818  # no error: the model stays as it is
    """Nothing can be tried, for the reason that is the message."""


def decline_for(*reasons: str | None) -> None:
    """Raise `Declined` with the first of these reasons, if there is one."""
    if (reason := next((found for found in reasons if found), None)) is not None:
        raise Declined(reason)


def min_images(max_changed: float) -> int:
    """Number of images that it takes to show that a setting is safe."""
    return max(MIN_DECISION_IMAGES, images_needed(max_changed))


def too_few_images(images: int, max_changed: float) -> str | None:
    """The reason why so few different images cannot show that a setting is safe, or None."""
    if images < MIN_DECISION_IMAGES:
        return (
            f"{images} different images are too few to show that a setting is safe; give {MIN_DECISION_IMAGES} or more"
        )
    if images < (fewest := images_needed(max_changed)):
        return (
            f"{images} different images cannot show that at most {max_changed:.2%} of the answers change; give {fewest}"
        )
    return None


def answers_alike(answers: Iterable[Tensor]) -> str | None:
    """The reason why the answers to images, of all ranks, are too much alike to judge settings by them, or None."""
    share, _ = _commonest(Counter(digest(answer) for part in answers for answer in part.cpu()))
    if share <= MOST_ALIKE:
        return None
    return (
        f"it gives {share:.0%} of the images the same answer, so a setting that always gives this answer would seem to "
        "be right; calibrate on images of all classes, shuffled, or pass a rule to correct"
    )


def background_of(answers: Iterable[Tensor]) -> int | None:
    """The answer that nearly all pixels, or labels, of all images have; None if there is none, or one answer per image.

    A setting that erases every small object would keep this answer nearly everywhere.
    """
    mine = Counter[int | None]()
    for part in answers:
        if part.dim() > 1:
            values, counts = torch.unique(part, return_counts=True)
            mine.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    share, common = _commonest(mine)
    return common if share > MOST_ALIKE else None


def _commonest(mine: Counter[T]) -> tuple[float, T | None]:
    """The commonest of what all ranks have counted, after its share."""
    counts = sum(gathered(mine), Counter[T]())
    if not counts:
        return 0.0, None
    value, count = counts.most_common(1)[0]
    return count / counts.total(), value
