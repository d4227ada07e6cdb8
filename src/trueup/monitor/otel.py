"""Metrics for OpenTelemetry: instruments that are read when the reader of the application asks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

from trueup.monitor.metrics import EMPTY, Metric, Source, metrics_from, metrics_of


def observe(meter: Any, snapshot: Source) -> None:
    """Add observable instruments to a meter of OpenTelemetry.

        observe(opentelemetry.metrics.get_meter("my.service"), monitor.snapshot)

    Their names are those of Prometheus with a dot: `trueup.images`, `trueup.evidence.sum`, `trueup.drifted`. The
    histogram of p-values is a counter with the upper edge as the attribute `le`, because OpenTelemetry has no
    observable histogram. `trueup.drift_since_timestamp_seconds` has no value before an alarm. `snapshot` is called
    once per collection.

    For several models, call `observe` once, with a mapping from their names, which become the attribute `model`:

        observe(meter, {"classifier": monitor.snapshot, "detector": other.snapshot})

    OpenTelemetry ignores instruments that are there already, and with them a second call.
    """
    try:
        from opentelemetry.metrics import Observation
    except ImportError as error:
        raise ImportError("observe needs OpenTelemetry: pip install 'trueup[opentelemetry]'") from error
    seen = _OncePerCollection(lambda: {metric.name: metric for metric in metrics_from(snapshot)})

    def add(metric: Metric, suffix: str) -> None:
        name = metric.name.replace("_", ".", 1) + suffix.replace("_total", "").replace("_", ".")

        def read(_options: object) -> Iterable[Any]:
            samples = seen.by(name)[metric.name].samples
            return [
                Observation(s.value, dict(s.labels)) for s in samples if s.suffix == suffix and not math.isnan(s.value)
            ]

        create = meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
        create(name, callbacks=[read], description=metric.help)

    for metric in metrics_of(EMPTY):
        for suffix in dict.fromkeys(sample.suffix for sample in metric.samples):
            add(metric, suffix)


class _OncePerCollection:
    """The same metrics for all instruments of a collection. OpenTelemetry asks each instrument by itself.

    An instrument that asks for the second time begins another collection.
    """

    def __init__(self, look: Callable[[], dict[str, Metric]]) -> None:
        self._look, self._lock = look, threading.Lock()
        self._found: dict[str, Metric] = {}
        self._asked: set[str] | None = None  # instruments that have these; None before the first collection

    def by(self, instrument: str) -> dict[str, Metric]:
        """Return the metrics for an instrument."""
        with self._lock:
            if self._asked is None or instrument in self._asked:
                self._found, self._asked = self._look(), set()
            self._asked.add(instrument)
            return self._found
