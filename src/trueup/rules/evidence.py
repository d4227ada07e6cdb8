"""The rule of evidence as a value, with every constant that it has."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import ClassVar, Literal

# What calibration records for this rule. The rule itself is chosen later, so these cannot be its fields.
BAND_SIDE = 8  # maps whose smaller side is at least this are split into bands; below it, most of a map is border
GATE_DEPTH = 1 / 3  # first share of a model's norms; they show how a picture was taken rather than what it shows
GATE_NORMS = 2  # norms that the gate reads: the last ones within GATE_DEPTH
NUISANCE_FLOOR = 0.1  # `floor` of the statistics whose drift under perturbation is measured

_SHARES = {
    "budget": (
        "the share of clean images that may count as fully unusual",
        "0.005 is careful, 0.02 bold, 1 switches the gate off",
    ),
    "strength": ("the share of clean variance that evidence may remove", "0.03 is careful, 0.1 strong"),
    "base": ("the image's share in a mix with the clean statistics", "0 asks for evidence, 0.08 is usual"),
    "least": ("the gate value of an image that looks clean", "0 leaves such images alone, 0.05 corrects them a little"),
    "depth": ("the first share of the model's norms that is corrected", "0.4 is careful, 14/15 is the default"),
    "before_gate": ("the gate value at norms before the gate is known", "0.5 is the default"),
}


@dataclass(frozen=True, repr=False)
class Evidence:
    """Move each channel after a norm back towards clean images, in proportion to the evidence that it has shifted.

        Evidence()                                  # gated: unusual images are corrected, others only a little
        Evidence(least=0)                           # images that look clean keep the model's answer, bit for bit
        Evidence(budget=1, strength=0.02, base=0)   # no gate: every image is treated alike

    Most users need none of these: `calibrate` chooses a setting for the model (`targets.rule`).

    budget: share α of clean images that the gate may count as fully unusual. With p the share of held-out clean images
        that look at least as unusual as this one, g = log(20 α / p) / log 20, limited to 0...1. 1 switches the gate
        off. p is at least 1 / (n + 1) for n held-out images (half of those kept), so with a few dozen calibration
        images a small budget can open the gate only in part.
    strength: how much evidence moves. A statistic that lies z clean standard deviations from its clean mean moves by
        the share z² / (z² + κ) of the distance; κ is set, per channel and statistic, so that this would remove the
        share `strength` of the statistic's variance on clean images. 0 ignores evidence, 1 moves every statistic fully.
    base: how much is moved without evidence, by mixing the image's statistics with the clean ones as batch norm mixing
        does (N = 1 / base - 1).
    least: gate value of an image that looks clean. Evidence and base are multiplied by least + (1 - least) g. With 0,
        an image with p >= 20 α comes out as from the model itself (on a GPU, up to the rounding of fused norms).
    bands: split maps into local 3 x 3 means and the rest, each with its own deviation: noise raises only the second,
        blur lowers only the second. Maps smaller than 8 pixels, and tokens, always have one deviation.
    depth: first share of the model's norms that is corrected. Early norms reflect how a picture was taken, late norms
        what it shows.

    nuisance: weigh each channel's evidence by how much of the channel's variation is due to how a picture was taken,
        as calibration measured it on perturbed images.
    tuned: weigh each channel's evidence by weights learned at calibration, so that the corrected model answers
        perturbed images as the model answers the clean ones. Needs `bands`, and replaces `nuisance`.

    The remaining fields are constants that ablations vary: `counts`, the weights of the evidence of a mean, of a low
    band's (or a whole map's) deviation and of a high band's; `ramp`, the 20 above; `before_gate`, the gate value at
    norms that come before the gate has read (at least `least`, and 0 if that is 0); `floor`, the share of a channel's
    mean clean variance below which variances are not distinguished. It limits how much detail a blurred image gets
    back: a deviation grows by at most sqrt(1 + 1 / floor).

    The mathematics is in `trueup.functional.evidence` and `trueup.functional.gate`.

    >>> Evidence(budget=0.02)
    Evidence(budget=0.02, strength=0.08, base=0.08, least=0.05, bands=True)
    """

    site_kind: ClassVar[Literal["norm"]] = "norm"  # of the sites that it corrects

    budget: float = 0.01
    strength: float = 0.08
    base: float = 0.08
    least: float = 0.05
    bands: bool = True
    depth: float = 14 / 15
    nuisance: bool = False
    tuned: bool = False
    counts: tuple[float, float, float] = (0.25, 0.5, 1.0)
    ramp: float = 20.0
    before_gate: float = 0.5
    floor: float = 1e-3

    def __post_init__(self) -> None:
        for name, (meaning, advice) in _SHARES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
                raise ValueError(f"Evidence({name}={value!r}): {meaning} is a number between 0 and 1; {advice}")
            object.__setattr__(self, name, float(value))  # numpy's numbers are accepted
        for name in ("bands", "nuisance", "tuned"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Evidence({name}={getattr(self, name)!r}): expected True or False")
        if self.tuned and (self.nuisance or not self.bands):
            raise ValueError(
                "Evidence(tuned=True): the learned weights are for bands=True, and take the place of nuisance=True"
            )
        if len(self.counts) != 3 or not all(0 < count < math.inf for count in self.counts):
            raise ValueError(f"Evidence(counts={self.counts!r}): expected three positive weights")
        object.__setattr__(self, "counts", tuple(float(count) for count in self.counts))
        if not (1 < self.ramp < math.inf and 0 < self.floor <= 1):
            raise ValueError(
                f"Evidence(ramp={self.ramp!r}, floor={self.floor!r}): expected ramp > 1 and 0 < floor <= 1"
            )
        for name in ("ramp", "floor"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if f.name in _ALWAYS_SHOWN or getattr(self, f.name) != f.default]
        return f"Evidence({', '.join(f'{f.name}={_short(getattr(self, f.name))}' for f in shown)})"

    @property
    def changes(self) -> bool:
        """Whether the rule changes anything."""
        return (self.strength > 0 or self.base > 0) and (self.budget > 0 or self.least > 0) and self.depth > 0

    @property
    def gated(self) -> bool:
        """Whether the rule reads how unusual an image is."""
        return self.changes and self.budget < 1 and self.least < 1

    @property
    def _gate_before_known(self) -> float:
        """Gate value at norms that come before the gate has read."""
        return max(self.before_gate, self.least) if self.least > 0 else 0.0

    def _count_corrected(self, norms: int) -> int:
        """Number of a model's `norms`, from the first on, that the rule corrects: at least one, unless `depth` is 0.

        >>> Evidence()._count_corrected(19), Evidence(depth=0.4)._count_corrected(53)
        (18, 21)
        """
        return max(norms - int((1 - self.depth) * norms + 0.5), min(norms, 1 if self.depth > 0 else 0))


CAREFUL = Evidence(budget=1.0, strength=0.02, base=0.0, depth=0.12)
"""Rule of targets without a decision: a weak correction of the earliest norms, which depend least on what an image
shows."""

_ALWAYS_SHOWN = ("budget", "strength", "base", "least", "bands")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
