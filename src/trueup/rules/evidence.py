"""The rule of evidence as a value: how many clean images it may touch, how strong it is, which statistics it moves."""

from __future__ import annotations

from dataclasses import dataclass

_BOUNDS = {
    "budget": (
        "the share of clean images that may count as fully unusual",
        "0.005 is careful, 0.02 bold, 1 counts all",
    ),
    "strength": ("the share of clean variance that evidence may take away", "0.03 is careful, 0.1 strong"),
    "base": ("the image's share in a mix with what is usual", "0 asks for evidence, 0.08 is usual"),
    "least": ("how far every image is open at least", "0 leaves usual images alone, 0.05 corrects all a little"),
}


@dataclass(frozen=True)
class Evidence:
    """How far each channel of a normalisation layer's output is moved back to what it is on clean images.

    Two questions decide it. How far is this channel from what it is on clean images? One that looks as it should is
    nearly left alone, one that is ten spreads away is moved back. And does the whole image look unusual, early in the
    network? If not, nobody can tell whether it is clean, and a correction may harm. `trueup.functional.evidence` is the
    mathematics of the first question, `trueup.functional.gate` that of the second.

    What is moved are a channel's mean and the logarithm of its standard deviation over one image's map. A statistic
    that lies `z` of its clean spreads from its clean mean goes the share z² / (z² + κ) of the way. `strength` fixes κ,
    for each channel and statistic on its own: on clean images, this would take away so much of the statistic's
    variance if evidence counted in full. 0 asks for infinite evidence; 1 moves every statistic all the way. Evidence
    counts a quarter for a mean and half for a deviation, but that of a high band (see `bands`): what is coarse says
    more of what is in a picture, what is fine more of how it was taken. The rest of the way, a statistic goes without
    evidence, by mixing: a mean by the share `base`, a deviation as if its batch norm had mixed its variance with the
    image's own, of that share.

    `budget` is the share α of clean images that may count as fully unusual. With p the share of held-out clean
    images that are as unusual as this one, g = log(20 α / p) / log 20, between 0 and 1. With 0, no image counts as
    unusual; with 1, all do, and nothing is asked. p is at least 1 / (n + 1) for n held-out images, half of those that
    were kept: with a few dozen calibration images, a small budget can open the gate only in part, or not at all.

    An image is open by `least` + (1 - least) g, and that is what its evidence and base count: all of it for an image
    that is plainly unusual, and a little for one that is like clean ones. Norms that come before that is known take it
    to be open by half, or by `least` if that is more. With `least=0` they are left as they are, and an image with p ≥
    20 α comes out as from the model itself, bit for bit (on a GPU, but for the rounding of batch norms): safer, and
    weaker. With `least=1`, as with `budget=1`, every image is open, and nothing is asked.

    With `bands`, a map is split into its local means over 3 x 3 and the rest, and each of the two has a deviation
    of its own: noise raises the second only, blur lowers it only. Maps whose smaller side was less than 8 in
    calibration, and what is no map of two dimensions, have one deviation in any case.

    How many answers on clean images change, these numbers do not say: `trueup.choose` finds how strong a rule may be.

    The last fifteenth of a model's norms is left alone, rounded: one of 19 in a ResNet-20, four of 53 in a ResNet-50.
    What is there goes to the classifier, and is about what the picture is of.

    >>> Evidence(budget=0.02)
    Evidence(budget=0.02, strength=0.08, base=0.08, least=0.05, bands=True)
    """

    budget: float = 0.01
    strength: float = 0.08
    base: float = 0.08
    least: float = 0.05
    bands: bool = True

    def __post_init__(self) -> None:
        for name, (meaning, advice) in _BOUNDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"Evidence({name}={value!r}): {meaning} lies between 0 and 1; {advice}")
        if not isinstance(self.bands, bool):
            raise ValueError(f"Evidence(bands={self.bands!r}): want True or False")

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return (self.strength > 0 or self.base > 0) and (self.budget > 0 or self.least > 0)

    @property
    def gated(self) -> bool:
        """Whether it asks how unusual an image is."""
        return self.changes and self.budget < 1 and self.least < 1

    @property
    def early(self) -> float:
        """How far an image is taken to be open in norms that come before that is known."""
        return max(0.5, self.least) if self.least > 0 else 0.0
