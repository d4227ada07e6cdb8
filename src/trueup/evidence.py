"""The rule of evidence as a value: how much of clean images' own variety it may cost, and which statistics it moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Evidence:
    """How far each channel of a normalisation layer's output is moved back to what it is on clean images.

    A channel that looks as it does on clean images is left alone; one that is ten spreads away is moved back. What is
    moved are a channel's mean and the logarithm of its standard deviation over one image's map; how far, the evidence
    says: a statistic that lies `z` of its clean spreads from its clean mean goes the share z² / (z² + κ) of the way.
    `trueup.channels` is the mathematics.

    `budget` chooses κ, for each channel and statistic on its own: on clean images the correction may take away this
    share of the statistic's variance. 0 changes nothing, not a bit; 1 moves every statistic all the way, and with it
    everything in which clean images differ. The default is a hundredth.

    With `bands`, a map is split into its local means over 3 x 3 and the rest, and each of the two has a deviation of
    its own: noise raises the second only, blur lowers it only. Maps whose smaller side was less than 8 in calibration,
    and what is no map of two dimensions, have one deviation in any case.

    >>> Evidence(budget=0.02)
    Evidence(budget=0.02, bands=True)
    """

    budget: float = 0.01
    bands: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.budget, bool) or not isinstance(self.budget, int | float) or not 0 <= self.budget <= 1:
            raise ValueError(
                f"Evidence(budget={self.budget!r}): the share of clean variance that may be lost lies between 0 and 1; "
                "0.01 is careful, 0.05 strong"
            )
        if not isinstance(self.bands, bool):
            raise ValueError(f"Evidence(bands={self.bands!r}): want True or False")
