"""Limits within which a setting is safe: what it may change on clean images.

`trueup.targets.decision` judges settings by them. `trueup.choose` knows only the first, with a default of its own.
"""

from __future__ import annotations

import math

MAX_CHANGED = 0.05
"""Share of clean answers that the setting chosen by `calibrate` may change, unless the user says otherwise."""

MAX_CHANGED_OF_CHOOSE = 0.005
"""The same for `choose`, which promises it for new images, and so asks for more images."""

MAX_MOVED = 0.06
"""How far the scores of clean images may move on average, relative to their size. A model is sure of its training
images, so their answers hardly change; their scores move about as far as those of unseen images."""


def check_max_changed(verb: str, value: object) -> None:
    """Raise ValueError unless `value` is a share above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{verb}(max_changed={value!r}): expected a share of clean images, above 0 and at most 1")


def images_needed(max_changed: float) -> int:
    """Number of images, none of whose answers change, that show that at most `max_changed` of new ones do.

    A new image counts as changed: (0 + 1) / (images + 1) <= max_changed.

    >>> images_needed(0.05), images_needed(0.005)
    (19, 199)
    """
    return math.ceil(1 / max_changed - 1e-9) - 1
