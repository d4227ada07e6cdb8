"""`Snapshot`: counts and sums of a monitor's window, as a small value that adds, prints, saves and loads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

from trueup.atomic import write_atomically
from trueup.monitor.binomial import Share, share_of
from trueup.monitor.drift import Alarm
from trueup.monitor.sealed import seal, unseal
from trueup.plurals import counted

P_EDGES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Upper edges of the histogram of p-values, as in Prometheus: a p-value is counted at the first edge that it does not
exceed."""
EVIDENCE_CAP = 100.0  # limit of an image's evidence at a norm: one broken image should not hide all others
FORMAT, VERSION = "trueup snapshot", 1


@dataclass(frozen=True)
class Drift:
    """The drift test of one stream of images: see `trueup.monitor.drift`."""

    images: int  # seen since the test began
    log_e: float  # natural logarithm of the e-value now
    log_largest: float  # natural logarithm of the largest e-value so far
    false_alarm: float
    alarm: Alarm | None


@dataclass(frozen=True)
class Snapshot:
    """Counts and sums of a window that a monitor has seen. Its size does not depend on the number of images.

        snapshot = monitor.snapshot()
        print(snapshot)
        snapshot.unusual, snapshot.drifted, snapshot.since
        both = snapshot + trueup.monitor.Snapshot.load("other-worker.json")

    Adding joins windows or workers: counts and sums add up. The later drift test of each stream of images is kept. The
    tests of W streams are joined by Bonferroni's inequality: the largest e-value counts for a W-th, so that the joint
    false-alarm probability holds whatever the streams have in common.
    """

    norms: tuple[str, ...]
    unusual_at: float  # p-value up to which an image counts as unusual
    images: int = 0
    not_finite: int = 0
    unusual_images: int = 0
    histogram: tuple[int, ...] = (0,) * len(P_EDGES)  # of p-values, by P_EDGES
    p_sum: float = 0.0
    gate_sum: float = 0.0
    evidence_sum: tuple[float, ...] = ()
    evidence_images: tuple[int, ...] = ()
    compared: int = 0  # images whose answer was compared with the model's
    changed: int = 0
    began: float | None = None  # time of the first image, in seconds since 1970
    ended: float | None = None
    streams: Mapping[str, Drift] = field(default_factory=dict)
    calibration: str = ""  # digest of the clean images among which images are ranked; empty if unknown

    def __post_init__(self) -> None:
        for name, empty in (("evidence_sum", 0.0), ("evidence_images", 0)):
            if not getattr(self, name):
                object.__setattr__(self, name, (empty,) * len(self.norms))

    def __add__(self, other: Snapshot) -> Snapshot:
        if not isinstance(other, Snapshot):
            return NotImplemented
        for name in ("norms", "unusual_at"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(
                    f"these snapshots cannot be added: {name} is {mine!r} in one and {theirs!r} in the other"
                )
        calibrations = sorted({self.calibration, other.calibration} - {""})
        if len(calibrations) > 1:
            raise ValueError(
                "these snapshots cannot be added: their p-values are ranks among the clean images of two calibrations "
                f"({' and '.join(calibrations)}); add up the windows of each calibration by itself"
            )
        numbers = ("images", "not_finite", "unusual_images", "p_sum", "gate_sum", "compared", "changed")
        rows = ("histogram", "evidence_sum", "evidence_images")
        times = [(a, b) for a, b in ((self.began, self.ended), (other.began, other.ended)) if a is not None]
        streams = dict(self.streams)
        for stream, drift in other.streams.items():
            if stream not in streams or drift.images > streams[stream].images:
                streams[stream] = drift
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in numbers}
        for name in rows:
            sums[name] = tuple(a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True))
        return replace(
            self,
            **sums,
            began=min((a for a, _ in times), default=None),
            ended=max((b for _, b in times if b is not None), default=None),
            streams=streams,
            calibration="".join(calibrations),
        )

    def __radd__(self, other: int) -> Snapshot:
        """0 + snapshot, so that `sum` adds up snapshots."""
        return self if other == 0 else NotImplemented

    @property
    def unusual(self) -> Share:
        """Share of unusual images, with its 95 % confidence interval. It should be `unusual_at` or less."""
        return share_of(self.unusual_images, self.images)

    @property
    def changed_answers(self) -> Share:
        """Share of the compared images whose answer the correction changed, with its 95 % confidence interval."""
        return share_of(self.changed, self.compared)

    @property
    def gate(self) -> float:
        """Mean gate value: how much of the correction images got. NaN if there are none."""
        return self.gate_sum / self.images if self.images else math.nan

    @property
    def evidence(self) -> dict[str, float]:
        """Mean evidence at each norm: about 1 on clean images. NaN if there are none."""
        pairs = zip(self.norms, self.evidence_sum, self.evidence_images, strict=True)
        return {name: total / count if count else math.nan for name, total, count in pairs}

    @property
    def log_e_value(self) -> float:
        """Natural logarithm of the largest e-value so far: evidence against "inputs are as in calibration"."""
        largest = max((drift.log_largest for drift in self.streams.values()), default=0.0)
        return largest - math.log(max(len(self.streams), 1))

    @property
    def false_alarm_probability(self) -> float:
        """Bound on the probability that clean inputs would ever have led to so large an e-value."""
        return math.exp(min(0.0, -self.log_e_value))

    @property
    def drifted(self) -> bool:
        """Whether the drift test has raised an alarm. It stays until the test is restarted."""
        return self._alarm is not None

    @property
    def since(self) -> datetime | None:
        """Estimated start of the drift; None without an alarm."""
        return None if self._alarm is None else local_time(self._alarm.since)

    @property
    def _alarm(self) -> Alarm | None:
        """The alarm that began first, among those that hold for all streams together."""
        limit = math.log(max(len(self.streams), 1))
        alarms = [
            drift.alarm
            for drift in self.streams.values()
            if drift.alarm is not None and drift.log_largest - limit >= -math.log(drift.false_alarm)
        ]
        return min(alarms, key=lambda alarm: alarm.since, default=None)

    def __str__(self) -> str:
        if not self.images:
            return "no images yet"
        window = " to ".join(f"{local_time(t):%Y-%m-%d %H:%M:%S}" for t in (self.began, self.ended) if t is not None)
        at, share = f"unusual (p <= {self.unusual_at:g})", self.unusual
        lines = [
            f"{counted(self.images, 'image')}, {window}",
            self.verdict,
            f"{at}: {share.value:.2%} of the images ({share.low:.2%} to {share.high:.2%})",
            f"mean gate value: {self.gate:.2f}",
        ]
        if self.compared:
            changed = self.changed_answers
            lines.append(f"answers changed: {changed.value:.2%} of {self.compared} images ({changed.high:.2%} at most)")
        if self.not_finite:
            lines.append(f"not finite: {counted(self.not_finite, 'image')}")
        width = max((len(name) for name in self.norms), default=0)
        lines += [f"  {name:{width}}  evidence {value:.2f}" for name, value in self.evidence.items()]
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """The drift test's result, as a sentence."""
        e_value = f"e-value 10^{self.log_e_value / math.log(10):.1f}"
        if self.since is None:
            return f"no drift found ({e_value})"
        return (
            f"inputs have drifted since {self.since:%Y-%m-%d %H:%M:%S} ({e_value}; the probability that clean inputs "
            f"ever lead to this is {self.false_alarm_probability:.1g} at most)"
        )

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return seal(FORMAT, VERSION, asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """The snapshot that `to_json` wrote. Raises ValueError if the text is something else, or damaged."""
        found = unseal(text, FORMAT, VERSION)
        try:
            found = {"calibration": "", **found}  # unknown in earlier files
            values = {f.name: found[f.name] for f in fields(cls)}
            for name in ("norms", "histogram", "evidence_sum", "evidence_images"):
                values[name] = tuple(values[name])
            values["streams"] = {stream: _drift(drift) for stream, drift in values["streams"].items()}
            snapshot = cls(**values)
            _check(snapshot)
            return snapshot
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a complete snapshot: {error!r}") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write a small JSON file atomically: a reader never sees half of it."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Snapshot:
        """Read a file that `save` wrote."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def merged(*paths: str | PathLike[str]) -> Snapshot:
    """Load and add snapshots of several windows or workers."""
    if not paths:
        raise ValueError("merged: expected the path of at least one snapshot")
    first, *others = (Snapshot.load(path) for path in paths)
    return sum(others, first)


def local_time(seconds: float) -> datetime:
    """Local time, from seconds since 1970."""
    return datetime.fromtimestamp(seconds).astimezone()


def _check(snapshot: Snapshot) -> None:
    """Raise ValueError if the counts and sums cannot be those of any images."""
    counts = (snapshot.changed, snapshot.compared, snapshot.unusual_images, snapshot.not_finite, snapshot.images)
    sums = (snapshot.p_sum, snapshot.gate_sum, snapshot.unusual_at, *snapshot.evidence_sum)
    times = [time for time in (snapshot.began, snapshot.ended) if time is not None]
    fit = (
        all(type(count) is int and count >= 0 for count in (*counts, *snapshot.histogram, *snapshot.evidence_images))
        and all(type(value) in (int, float) and not value < 0 for value in (*sums, *times))  # NaN is allowed
        and snapshot.changed <= snapshot.compared <= snapshot.images
        and max(counts) == snapshot.images
        and len(snapshot.histogram) == len(P_EDGES)
        and len(snapshot.evidence_sum) == len(snapshot.evidence_images) == len(snapshot.norms)
        and all(isinstance(text, str) for text in (*snapshot.norms, snapshot.calibration))
    )
    if not fit:
        raise ValueError(f"a damaged {FORMAT}: its counts and sums cannot be those of any images")


def _drift(values: dict[str, Any]) -> Drift:
    alarm = values["alarm"]
    return Drift(**{**values, "alarm": None if alarm is None else Alarm(**alarm)})
