"""The setting that calibration chose for a model, and the trials behind the choice."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from trueup.rules import Evidence
from trueup.rules.limits import MAX_CHANGED, MAX_MOVED

LEFT_ALONE = Evidence(strength=0.0, base=0.0)
"""The rule that leaves a model as it is."""


@dataclass(frozen=True)
class Trial:
    """One setting, tried on clean images and perturbed copies of them. Sums over images, so adding two merges them.

    The corrected model keeps an answer if it gives an image, or a perturbed copy, the answer that the model itself
    gives the clean image. An image's value is the weighted share of its answers that are kept; the weights say how
    common clean and perturbed inputs are assumed to be. Its gain is that value minus the uncorrected model's.
    """

    rule: Evidence
    images: int
    changed: float  # clean answers that change
    kept: tuple[float, ...]  # answers kept under each level of perturbation
    gain: float
    gain_square: float
    moved: float = 0.0  # of clean scores, relative to their size

    def __add__(self, other: Trial) -> Trial:
        kept = tuple(a + b for a, b in zip(self.kept, other.kept, strict=True))
        sums = (self.images + other.images, self.changed + other.changed, kept)
        gains = (self.gain + other.gain, self.gain_square + other.gain_square)
        return Trial(self.rule, *sums, *gains, self.moved + other.moved)

    @property
    def share_changed(self) -> float:
        """Bound on the expected share of changed answers on new clean images: the new image counts as changed."""
        return (self.changed + (1 if self.rule.changes else 0)) / (self.images + 1)

    @property
    def mean_moved(self) -> float:
        """Mean distance that the scores of a clean image move, relative to their size."""
        return self.moved / self.images

    @property
    def mean_gain(self) -> float:
        """Mean gain per image."""
        return self.gain / self.images

    @property
    def error(self) -> float:
        """Standard error of the mean gain."""
        variance = self.gain_square / self.images - self.mean_gain**2
        return math.sqrt(max(variance, 0.0) / max(self.images - 1, 1))


@dataclass(frozen=True)
class Decision:
    """The setting that calibration chose for a model, and why.

    The choice is the setting with the largest gain among those that change at most `max_changed` of the clean answers
    and move clean scores by at most `MAX_MOVED` (`trueup.rules.limits`). If none of them gains, the model is left as it
    is. Without `trials`, `note` says why nothing was tried. Adding two pools the trials that both have.
    """

    trials: tuple[Trial, ...] = ()  # the first is the uncorrected model
    max_changed: float = MAX_CHANGED
    note: str = ""
    refused: int = 0  # settings that broke a limit on clean images, and were not tried on perturbed ones

    def __add__(self, other: Decision) -> Decision:
        """Pool the trials that both have. A decision without trials adds nothing."""
        if not (self.trials and other.trials):
            return self if self.trials else other
        theirs = {trial.rule: trial for trial in other.trials}
        pooled = tuple(trial + theirs[trial.rule] for trial in self.trials if trial.rule in theirs)
        refused = max(self._settings, other._settings) - (len(pooled) - 1)  # by either part
        return Decision(pooled, min(self.max_changed, other.max_changed), refused=refused)

    def allows(self, trial: Trial) -> bool:
        """Whether a trial kept both limits on clean images."""
        return not trial.rule.changes or (trial.share_changed <= self.max_changed and trial.mean_moved <= MAX_MOVED)

    @property
    def chosen(self) -> Trial | None:
        """Trial of the chosen setting; None if the model is left as it is."""
        allowed = [trial for trial in self.trials if trial.rule.changes and self.allows(trial)]
        best = max(allowed, key=lambda trial: trial.mean_gain, default=None)
        return best if best is not None and best.mean_gain > 0 else None

    @property
    def rule(self) -> Evidence:
        """The chosen setting; one that changes nothing if the model is left as it is."""
        return self.chosen.rule if self.chosen else LEFT_ALONE

    @property
    def _settings(self) -> int:
        return len(self.trials) - 1 + self.refused

    def __str__(self) -> str:
        if not self.trials:
            return f"The model is left as it is: {self.note}."
        before, images = self.trials[0], self.trials[0].images
        if (best := self.chosen) is None:
            return (
                f"The model is left as it is: none of {self._settings} settings, tried on {images} images, keeps "
                f"more answers under perturbation while changing at most {self.max_changed:.1%} of the clean ones and "
                f"moving clean scores by at most {MAX_MOVED:.0%}."
            )
        scores = f"clean scores move by {best.mean_moved:.1%} (allowed: {MAX_MOVED:.0%})"
        kept = [f"{a / images:.1%} -> {b / images:.1%}" for a, b in zip(before.kept, best.kept, strict=True)]
        return "\n".join(
            [
                f"{best.rule}",
                f"  chosen among {self._settings} settings on {images} images and perturbed copies of them",
                f"  clean answers that change: {best.share_changed:.1%} (allowed: {self.max_changed:.1%})",
                f"  {scores if best.moved else 'clean scores: the outputs hold none that could be compared'}",
                f"  answers kept under mild perturbation: {kept[0]}",
                f"  answers kept under strong perturbation: {kept[-1]}",
                f"  gain: {100 * best.mean_gain:.2f} points, standard error {100 * best.error:.2f}",
            ]
        )

    def to_json(self) -> str:
        """Text for a file's header."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        trials = tuple(_trial(trial) for trial in values["trials"])
        max_changed, note, refused = values["max_changed"], values["note"], values.get("refused", 0)
        if trials and (trials[0].rule != LEFT_ALONE or len({(t.images, len(t.kept)) for t in trials}) > 1):
            raise ValueError("the trials of the decision do not belong together")
        if not isinstance(note, str) or not 0 < max_changed <= 1:
            raise ValueError(f"the decision has max_changed={max_changed!r} and note={note!r}")
        if type(refused) is not int or not 0 <= refused < 1 << 53:
            raise ValueError(f"the decision refused {refused!r} settings")
        return cls(trials, float(max_changed), note, refused)


def _trial(values: dict[str, object]) -> Trial:
    rule = values["rule"]
    if not isinstance(rule, dict) or not isinstance(values["kept"], list):
        raise ValueError("a trial of the decision has no rule or no answers")
    numbers = [values["changed"], *values["kept"], values["gain"], values["gain_square"], values.get("moved", 0.0)]
    if not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
        raise ValueError("a trial of the decision holds something that is not a number")
    images = values["images"]
    if not isinstance(images, int) or isinstance(images, bool) or not 0 < images < 1 << 53:
        raise ValueError(f"a trial of the decision has {images!r} images")
    changed, *kept, gain, square, moved = (float(n) for n in numbers)
    if len(kept) < 2 or not 0 <= changed <= images:
        raise ValueError(f"a trial of the decision has {changed} changed answers of {images}, and {len(kept)} levels")
    most = images * (1 + 1e-6)  # sums of shares, rounded
    if min(kept) < 0 or min(square, moved) < 0 or max(*kept, abs(gain), square) > most:
        raise ValueError(f"a trial of the decision has sums that {images} images cannot give")
    setting = Evidence(**(rule | {"counts": tuple(rule["counts"])}))
    return Trial(setting, images, changed, tuple(kept), gain, square, moved)
