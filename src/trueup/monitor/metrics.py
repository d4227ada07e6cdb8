"""A snapshot as metrics: the names that all exporters share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from trueup.monitor.snapshot import P_EDGES, Snapshot

Kind = Literal["counter", "gauge", "histogram", "summary"]
Source = Callable[[], Snapshot] | Mapping[str, Callable[[], Snapshot]]
"""What returns the snapshot of a model; or, for several models, a mapping from their names."""


class Sample(NamedTuple):
    """One number of a metric. `suffix` is appended to the metric's name."""

    suffix: str
    labels: Mapping[str, str]
    value: float


class Metric(NamedTuple):
    """A metric as Prometheus understands it."""

    name: str
    kind: Kind
    help: str
    samples: list[Sample]


EMPTY = Snapshot(("",), 0.01)  # its metrics have the names of all


def metrics_from(source: Source) -> list[Metric]:
    """All metrics as they are now."""
    if callable(source):
        return metrics_of(source())
    return metrics_of({name: snapshot() for name, snapshot in list(source.items())})  # models may be added meanwhile


def metrics_of(snapshots: Snapshot | Mapping[str, Snapshot]) -> list[Metric]:
    """All metrics of a snapshot; or of several models' snapshots by name, with the label `model`.

    Each metric stands once, with the samples of all models, as Prometheus wants it.
    """
    if isinstance(snapshots, Snapshot):
        return _metrics(snapshots)
    every = [(name, _metrics(snapshot)) for name, snapshot in snapshots.items()]
    return [
        metric._replace(
            samples=[s._replace(labels={"model": name, **s.labels}) for name, own in every for s in own[k].samples]
        )
        for k, metric in enumerate(_metrics(EMPTY))
    ]


def _metrics(snapshot: Snapshot) -> list[Metric]:
    since = snapshot.since
    cumulative = 0
    buckets = []
    for edge, count in zip(P_EDGES, snapshot.histogram, strict=True):
        cumulative += count
        buckets.append(Sample("_bucket", {"le": f"{edge:g}"}, cumulative))
    buckets += [Sample("_bucket", {"le": "+Inf"}, cumulative), Sample("_sum", {}, snapshot.p_sum)]
    evidence = zip(snapshot.norms, snapshot.evidence_sum, snapshot.evidence_images, strict=True)
    return [
        _counter("images", "Images seen.", snapshot.images),
        _counter(
            "unusual_images", "Images whose p-value is at most unusual=, 0.01 by default.", snapshot.unusual_images
        ),
        _counter("not_finite_images", "Images with NaN or infinity in their activations.", snapshot.not_finite),
        _counter("compared_images", "Images whose answer was compared with the model's.", snapshot.compared),
        _counter("changed_answers", "Compared images whose answer changed.", snapshot.changed),
        Metric(
            "trueup_p_value",
            "histogram",
            "Share of clean images that look at least as unusual.",
            [*buckets, Sample("_count", {}, snapshot.images)],
        ),
        Metric(
            "trueup_gate",
            "summary",
            "Share of the correction that images got.",
            [Sample("_sum", {}, snapshot.gate_sum), Sample("_count", {}, snapshot.images)],
        ),
        Metric(
            "trueup_evidence",
            "summary",
            "Squared distance from clean images at a norm, in clean standard deviations; 1 on clean images.",
            [
                Sample(suffix, {"norm": name}, value)
                for name, total, count in evidence
                for suffix, value in (("_sum", total), ("_count", count))
            ],
        ),
        _gauge("drifted", "1 if the drift test has raised an alarm.", float(snapshot.drifted)),
        _gauge("drift_log10_e_value", "Largest e-value against clean inputs.", snapshot.log_e_value / math.log(10)),
        _gauge(
            "drift_since_timestamp_seconds",
            "Estimated start of the drift; NaN without an alarm.",
            math.nan if since is None else since.timestamp(),
        ),
    ]


def _counter(name: str, text: str, value: float) -> Metric:
    return Metric(f"trueup_{name}", "counter", text, [Sample("_total", {}, value)])


def _gauge(name: str, text: str, value: float) -> Metric:
    return Metric(f"trueup_{name}", "gauge", text, [Sample("", {}, value)])
