"""The paper's rule as a value: its step sizes, and what to do with location and zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Location = Literal["keep", "match"]
Method = Literal["auto", "sort", "histogram"]


@dataclass(frozen=True)
class Correction:
    """How far, and in which sense, activations are moved towards their target.

    `lambda1`, `lambda2` and `iterations` are the paper's λ₁, λ₂ and N_iter: the weight of the prior (the training
    distribution), the weight of the likelihood (what the image said), and how often the two take turns. They act
    through one number, the effective `step`.

    `location="keep"` leaves each layer's own mean where it is and corrects the shape around it, as the paper's text
    has it; `"match"` moves the mean to that of training too. With `sparse`, activations that are exactly zero stay
    zero.

    `method` chooses the algorithm. `"sort"` is exact. `"histogram"` costs little more than reading and writing the
    activations; it takes values for equal that differ by less than 0.4 %, or by less than 1/2048 of the target's
    largest value (`trueup.kernels` has the bound). Float64 has no histogram and is sorted. `"auto"` is the histogram
    wherever there is one.

    The defaults are the paper's for ImageNet, the most careful ones it uses on a large model.

    >>> Correction(lambda1=1.0, lambda2=0.2).step  # the paper's for CIFAR-10
    0.8
    """

    lambda1: float = 0.5
    lambda2: float = 0.5
    iterations: int = 1
    location: Location = "keep"
    sparse: bool = True
    method: Method = "auto"

    def __post_init__(self) -> None:
        for name in ("lambda1", "lambda2"):
            value = getattr(self, name)
            if not 0 <= value <= 1:  # also refuses NaN
                raise ValueError(f"Correction({name}={value!r}): a step size lies between 0 and 1")
        if not isinstance(self.iterations, int) or self.iterations < 0:
            raise ValueError(f"Correction(iterations={self.iterations!r}): want a whole number, 0 or more")
        for name, known in (("location", get_args(Location)), ("method", get_args(Method))):
            if getattr(self, name) not in known:
                raise ValueError(f"Correction({name}={getattr(self, name)!r}): want one of {', '.join(known)}")

    @property
    def step(self) -> float:
        """The effective step c_n: `iterations` rounds move an activation by `step` of its way to the target.

        Sorting again never changes the order, so the paper's loop is the linear recurrence
        d ← ρ d + λ₁ (1 - λ₂) (t - a) for the displacement d, with ρ = (1 - λ₁)(1 - λ₂); this is its n-th term.

        >>> Correction(lambda1=0.75, lambda2=0.25, iterations=2).step  # the paper's for MNIST with batch norm
        0.66796875
        """
        rho = (1 - self.lambda1) * (1 - self.lambda2)
        if rho == 1:
            return 0.0
        return self.lambda1 * (1 - self.lambda2) * (1 - rho**self.iterations) / (1 - rho)
