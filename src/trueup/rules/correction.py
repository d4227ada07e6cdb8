"""The paper's rule as a value: its step sizes, and how it treats location and zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from trueup.functional.paper import Location

Algorithm = Literal["auto", "sort", "histogram"]


@dataclass(frozen=True)
class Correction:
    """Move all activations of a layer towards the distribution they have on clean images: the paper's rule.

        Correction()                                 # the paper's setting for ImageNet, its most careful one
        Correction(lambda1=1.0, lambda2=0.2)         # the paper's setting for CIFAR-10
        Correction(lambda1=0.75, lambda2=0.25, iterations=2, location="match")

    `lambda1`, `lambda2` and `iterations` are the paper's λ₁, λ₂ and N_iter: the weight of the prior (the training
    distribution), the weight of the likelihood (the image), and how often the two alternate. They act through one
    number, the effective `step`.

    `location="keep"` keeps each layer's own mean and corrects the shape around it, as in the paper's text; `"match"`
    also moves the mean to the clean one. With `sparse`, activations that are exactly zero stay zero. That makes the
    rule discontinuous at zero, so it amplifies the rounding of another batch size.

    `method` chooses the algorithm. `"sort"` is exact. `"histogram"` costs little more than reading and writing the
    activations; it treats values as equal if they differ by less than 0.4 %, or by less than 1/2048 of the target's
    largest value (`trueup.kernels` has the bound). Float64 has no histogram and is sorted. `"auto"` takes the histogram
    wherever there is one.

    >>> Correction(lambda1=1.0, lambda2=0.2).step
    0.8
    """

    site_kind: ClassVar[Literal["activation"]] = "activation"  # of the sites that it corrects

    lambda1: float = 0.5
    lambda2: float = 0.5
    iterations: int = 1
    location: Location = "keep"
    sparse: bool = True
    method: Algorithm = "auto"

    def __post_init__(self) -> None:
        for name in ("lambda1", "lambda2"):
            value = getattr(self, name)
            if not 0 <= value <= 1:  # also refuses NaN
                raise ValueError(f"Correction({name}={value!r}): expected a step size between 0 and 1")
        if isinstance(self.iterations, bool) or not isinstance(self.iterations, int) or self.iterations < 0:
            raise ValueError(f"Correction(iterations={self.iterations!r}): expected a whole number, 0 or more")
        for name, known in (("location", get_args(Location)), ("method", get_args(Algorithm))):
            if getattr(self, name) not in known:
                raise ValueError(f"Correction({name}={getattr(self, name)!r}): expected one of {', '.join(known)}")

    @property
    def changes(self) -> bool:
        """Whether the rule changes anything."""
        return self.step > 0

    @property
    def step(self) -> float:
        """Effective step c_n: all `iterations` together move an activation by this share of its way to the target.

        Sorting again never changes the order, so the paper's loop is the linear recurrence
        d ← ρ d + λ₁ (1 - λ₂) (t - a) for the displacement d, with ρ = (1 - λ₁)(1 - λ₂); this is its n-th term.

        >>> Correction(lambda1=0.75, lambda2=0.25, iterations=2).step  # the paper's for MNIST with batch norm
        0.66796875
        """
        rho = (1 - self.lambda1) * (1 - self.lambda2)
        if rho == 1:
            return 0.0
        return self.lambda1 * (1 - self.lambda2) * (1 - rho**self.iterations) / (1 - rho)
