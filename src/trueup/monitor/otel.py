"""Metrics for OpenTelemetry: instruments that are read when the reader of the application asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trueup.monitor.metrics import Metric, metrics_of
from trueup.monitor.snapshot import Snapshot


def observe(meter: Any, snapshot: Callable[[], Snapshot]) -> None:
    """Add observable instruments to a meter of OpenTelemetry.

        observe(opentelemetry.metrics.get_meter("my.service"), monitor.snapshot)

    Their names are those of Prometheus with a dot: `trueup.images`, `trueup.evidence.sum`, `trueup.drifted`. The
    histogram of p-values is a counter with the upper edge as the attribute `le`, because OpenTelemetry has no
    observable histogram.
    """
    try:
        from opentelemetry.metrics import Observation
    except ImportError as error:
        raise ImportError("observe needs OpenTelemetry: pip install 'trueup[opentelemetry]'") from error

    def add(metric: Metric, suffix: str) -> None:
        def read(_options: object) -> Iterable[Any]:
            found = next(m for m in metrics_of(snapshot()) if m.name == metric.name)
            return [Observation(s.value, dict(s.labels)) for s in found.samples if s.suffix == suffix]

        name = metric.name.replace("_", ".", 1) + suffix.replace("_total", "").replace("_", ".")
        create = meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
        create(name, callbacks=[read], description=metric.help)

    for metric in metrics_of(snapshot()):
        for suffix in dict.fromkeys(sample.suffix for sample in metric.samples):
            add(metric, suffix)
