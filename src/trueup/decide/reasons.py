"""Reasons for which no setting can be shown to be safe, so that none is tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from trueup._distributed import gathered
from trueup.decide.sample import MIN_DECISION_IMAGES
from trueup.rules.limits import images_needed

MOST_ALIKE = 0.9  # largest share of images with one answer from which settings can be judged


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
    """The reason why answers per image, of all ranks, are too much alike to judge settings by them, or None.

    Answers per pixel are not judged: most pixels may well be background.
    """
    mine = Counter(answer for part in answers if part.dim() == 1 for answer in part.tolist())
    counts = sum(gathered(mine), Counter())
    share = max(counts.values(), default=0) / max(counts.total(), 1)
    if share <= MOST_ALIKE:
        return None
    return (
        f"it gives {share:.0%} of the images the same answer, so a setting that always gives this answer would seem to "
        "be right; calibrate on images of all classes, shuffled, or pass a rule to correct"
    )
