"""The rule of evidence as a value: how many clean images it may touch, how strong it is, which statistics it moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Evidence:
    """How far each channel of a normalisation layer's output is moved back to what it is on clean images.

    Two questions decide it. Does the whole image look unusual, early in the network? And how far is this channel from
    what it is on clean images? An image inside the range of clean ones is left alone, to the last bit; in an unusual
    one, a channel that looks as it should is left alone, and one that is ten spreads away is moved back. `trueup.gate`
    is the mathematics of the first question, `trueup.channels` that of the second.

    `budget` is the share α of clean images that may count as fully unusual. With p the share of held-out clean images
    that are as unusual as this one, the image's openness is g = log(20 α / p) / log 20, between 0 and 1: images with
    p ≥ 20 α come out as from the model itself, bit for bit (with a budget above 0.05 there are none). 0 changes nothing
    at all. 1 has no gate: every image is open. p is at least 1 / (n + 1) for n held-out images, half of those that were
    kept: with a few dozen calibration images, a small budget can open the gate only in part, or not at all.

    `strength` is how far an open image goes. What is moved are a channel's mean and the logarithm of its standard
    deviation over one image's map; a statistic that lies `z` of its clean spreads from its clean mean goes the share
    g z² / (g z² + κ) of the way. κ is chosen for each channel and statistic on its own: were all clean images open,
    the correction would take away this share of the statistic's variance. 0 changes nothing; 1 moves every statistic
    all the way.

    With `bands`, a map is split into its local means over 3 x 3 and the rest, and each of the two has a deviation of
    its own: noise raises the second only, blur lowers it only. Maps whose smaller side was less than 8 in calibration,
    and what is no map of two dimensions, have one deviation in any case.

    With `probe`, the openness is known before the first norm: the model's first part is run uncorrected, up to the
    last norm that the gate reads, and then the whole of it, corrected. Without, there is one pass only, and norms
    before that one are left as they are: cheaper, and weaker.

    >>> Evidence(budget=0.02)
    Evidence(budget=0.02, strength=0.03, bands=True, probe=True)
    """

    budget: float = 0.01
    strength: float = 0.03
    bands: bool = True
    probe: bool = True

    def __post_init__(self) -> None:
        for name, meaning, advice in (
            ("budget", "the share of clean images that may count as unusual", "0.005 is careful, 0.02 bold"),
            ("strength", "the share of clean variance that may be lost", "0.02 is careful, 0.05 strong"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"Evidence({name}={value!r}): {meaning} lies between 0 and 1; {advice}")
        for name in ("bands", "probe"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Evidence({name}={getattr(self, name)!r}): want True or False")

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self.budget > 0 and self.strength > 0

    @property
    def gated(self) -> bool:
        """Whether it asks how unusual an image is."""
        return self.changes and self.budget < 1
