"""The plan of a run, its progress, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from trueup_lab.data.corrupted_sets import Origin
from trueup_lab.evaluation.methods import Method
from trueup_lab.evaluation.rows import EvaluationRow
from trueup_lab.evaluation.streams import Stream, check_stream


@dataclass(frozen=True)
class Plan:
    """Plan of a run: methods, test sets and limits.

    `only` selects corruptions; `batch` is the batch size of methods that depend on it. `images` limits the test sets
    and `calibrate` the clean images for calibration; None means all. For segmentation, `set_aside` k calibrates on
    every k-th test image, without its labels, and tests on the others; 0 calibrates on training images.
    """

    methods: tuple[Method, ...]
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    only: tuple[str, ...] = ()
    stream: Stream = "corruption"
    batch: int = 200
    images: int | None = None
    calibrate: int | None = None
    seed: int = 0
    origin: Origin | None = None
    set_aside: int = 0

    def __post_init__(self) -> None:
        check_stream(self.stream)
        for name, count in (("batch", self.batch), ("images", self.images), ("calibrate", self.calibrate)):
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: expected at least one image")
        if self.origin not in (None, *get_args(Origin)):
            raise ValueError(f"origin={self.origin!r}: expected one of {', '.join(get_args(Origin))}")
        if not self.severities or not set(self.severities) <= {1, 2, 3, 4, 5}:
            raise ValueError(f"severities={self.severities}: expected some of 1, 2, 3, 4, 5")
        if not self.methods:
            raise ValueError("methods=(): expected at least one method")
        names = [method.name for method in self.methods]
        if len(set(names)) != len(names):
            raise ValueError(f"methods={', '.join(names)}: two have the same name; leave one out")


@dataclass(frozen=True)
class EvaluationProgress:
    """Progress of a run, in passes of one model and method over one or more test sets."""

    done: int
    total: int
    seconds: float
    what: str

    @property
    def left(self) -> float:
        """Estimated seconds left; 0 before the first pass is done."""
        return self.seconds / self.done * (self.total - self.done) if self.done else 0.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: whether its plan is complete, and the plan's rows, measured now or before.

    It is true if the plan is complete. `left_out` pairs models with methods that they do not support.
    """

    complete: bool
    rows: list[EvaluationRow]
    left_out: list[tuple[str, str]]

    def __bool__(self) -> bool:
        return self.complete
