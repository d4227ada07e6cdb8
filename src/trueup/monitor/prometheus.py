"""Metrics for Prometheus: as text, which needs nothing, or as a collector for its client library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trueup.monitor.metrics import Source, metrics_from, metrics_of
from trueup.monitor.snapshot import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def prometheus_text(snapshot: Snapshot | Mapping[str, Snapshot]) -> str:
    """The metrics of a snapshot in Prometheus's text format, to be served with `CONTENT_TYPE`.

    For several models, give a mapping from their names to snapshots: the name becomes the label `model`.

    >>> print(prometheus_text(Snapshot(("bn1",), 0.01)).splitlines()[2])
    trueup_images_total 0
    """
    lines = []
    for metric in metrics_of(snapshot):
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        for sample in metric.samples:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels.items())
            lines.append(f"{metric.name}{sample.suffix}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


class PrometheusCollector:
    """Metrics for a registry of prometheus_client, beside those that are there already.

        prometheus_client.REGISTRY.register(PrometheusCollector(monitor.snapshot))

    `snapshot` is called at each scrape. A registry takes one collector only; for several models, give it a mapping from
    their names, which become the label `model`:

        PrometheusCollector({"classifier": monitor.snapshot, "detector": other.snapshot})

    The mapping is read at each scrape too, so that models can be added to it later.
    """

    def __init__(self, snapshot: Source) -> None:
        try:
            from prometheus_client.core import Metric
        except ImportError as error:
            raise ImportError(
                "the collector needs prometheus_client: pip install 'trueup[prometheus]'; or serve prometheus_text()"
            ) from error
        self._snapshot, self._metric = snapshot, Metric

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as they are now."""
        for found in metrics_from(self._snapshot):
            metric = self._metric(found.name, found.help, found.kind)
            for sample in found.samples:
                metric.add_sample(found.name + sample.suffix, dict(sample.labels), sample.value)
            yield metric


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
