"""The rule of evidence as a value: how many clean images it may touch, how strong it is, which statistics it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AFTER_BATCH_NORM, AFTER_OTHERS = 0.05, 0.02  # the default strengths


@dataclass(frozen=True)
class Evidence:
    """How far each channel of a normalisation layer's output is moved back to what it is on clean images.

    Two questions decide it. How far is this channel from what it is on clean images? One that looks as it should is
    left alone, one that is ten spreads away is moved back. And does the whole image look unusual, early in the
    network? If not, nobody can tell whether it is clean, and a correction may harm. `trueup.channels` is the
    mathematics of the first question, `trueup.gate` that of the second.

    `strength` is how far a channel goes. What is moved are its mean and the logarithm of its standard deviation
    over one image's map; a statistic that lies `z` of its clean spreads from its clean mean goes the share z² / (z²
    + κ) of the way. κ is chosen for each channel and statistic on its own: on clean images, the correction takes
    away this share of the statistic's variance. 0 changes nothing; 1 moves every statistic all the way. None, the
    default, goes by the kind of norm: 0.05 after a batch norm, and 0.02 after others. Most of these measure an image by
    its own statistics, not by those of training, and so have taken out part of a shift already.

    `budget` is the share α of clean images that may count as fully unusual. With p the share of held-out clean
    images that are as unusual as this one, the image's openness is g = log(20 α / p) / log 20, between 0 and 1.
    With 0, no image counts as unusual; with 1, all do, and nothing is asked. p is at least 1 / (n + 1) for n
    held-out images, half of those that were kept: with a few dozen calibration images, a small budget can open the
    gate only in part, or not at all.

    With `passes=2` the model answers twice, as it is and corrected, and its answer is the mean of the two, with the
    weight (1 + g) / 2 on the corrected one: half and half for an image like clean ones, the corrected one alone for
    one that is plainly not. With `passes=1` it answers once, and evidence counts g times, z² becoming g z²: an
    image with p ≥ 20 α comes out as from the model itself, bit for bit (on a GPU, but for the rounding of batch
    norms). Norms before the last one that tells how unusual an image is are left as they are: cheaper, and weaker.

    With `passes=1` and `least` above 0, every image is corrected, an unusual one by more: evidence counts least + (1 -
    least) g, and half in the norms that come too early to know g.

    With `bands`, a map is split into its local means over 3 x 3 and the rest, and each of the two has a deviation
    of its own: noise raises the second only, blur lowers it only. Maps whose smaller side was less than 8 in
    calibration, and what is no map of two dimensions, have one deviation in any case.

    >>> Evidence(budget=0.02)
    Evidence(budget=0.02, strength=None, bands=True, passes=2, least=0.0)
    """

    budget: float = 0.005
    strength: float | None = None
    bands: bool = True
    passes: Literal[1, 2] = 2
    least: float = 0.0

    def __post_init__(self) -> None:
        for name, meaning, advice in (
            ("budget", "the share of clean images that may count as unusual", "0.002 is careful, 0.01 bold"),
            (
                "least",
                "what evidence counts at least, in one pass,",
                "0 leaves usual images alone, 0.2 corrects all",
            ),
            (
                "strength",
                "the share of clean variance that may be lost",
                "0.02 is careful, 0.05 strong, None goes by the kind of norm",
            ),
        ):
            value = getattr(self, name)
            if name == "strength" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"Evidence({name}={value!r}): {meaning} lies between 0 and 1; {advice}")
        if not isinstance(self.bands, bool):
            raise ValueError(f"Evidence(bands={self.bands!r}): want True or False")
        if type(self.passes) is not int or self.passes not in (1, 2):
            raise ValueError(f"Evidence(passes={self.passes!r}): want 1, which is cheaper, or 2, which is better")
        if self.least > 0 and self.passes == 2:
            raise ValueError(f"Evidence(least={self.least!r}): with two passes it has no say; give passes=1 too")

    def strength_after(self, norm: str) -> float:
        """The strength after a kind of norm, such as "batch_norm", as sites call it."""
        if self.strength is not None:
            return self.strength
        return AFTER_BATCH_NORM if norm == "batch_norm" else AFTER_OTHERS

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self.strength != 0 and (self.budget > 0 or self.passes == 2 or self.least > 0)

    @property
    def gated(self) -> bool:
        """Whether it asks how unusual an image is."""
        return self.changes and self.budget < 1 and (self.budget > 0 or self.least > 0)

    @property
    def early(self) -> float:
        """What evidence counts in norms that come before it is known how unusual the image is."""
        return 0.5 if self.least > 0 else 0.0

    @property
    def hedged(self) -> bool:
        """Whether the model's own answer counts too."""
        return self.changes and self.passes == 2 and self.budget < 1
