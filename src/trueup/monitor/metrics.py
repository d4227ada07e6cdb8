"""A snapshot as metrics: the names that all exporters share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from trueup.monitor.snapshot import P_EDGES, Snapshot

Kind = Literal["counter", "gauge", "histogram", "summary"]


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


def metrics_of(snapshot: Snapshot) -> list[Metric]:
    """All metrics of a snapshot."""
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
            "unusual_images", f"Images with a p-value of {snapshot.unusual_at:g} or less.", snapshot.unusual_images
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
