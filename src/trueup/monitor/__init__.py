"""Watching a deployed model: `Monitor`, the snapshots that it takes, and how they are exported.

robust = trueup.correct(model, targets, report=True)
monitor = trueup.Monitor(robust)
logits, report = robust(images)
monitor.update(report)
text = trueup.monitor.prometheus_text(monitor.snapshot())
"""

from trueup.monitor.binomial import Share
from trueup.monitor.drift import Alarm, DriftTest
from trueup.monitor.monitor import Monitor
from trueup.monitor.otel import observe
from trueup.monitor.prometheus import CONTENT_TYPE, PrometheusCollector, prometheus_text
from trueup.monitor.snapshot import P_EDGES, Drift, Snapshot, merged

__all__ = [
    "CONTENT_TYPE",
    "P_EDGES",
    "Alarm",
    "Drift",
    "DriftTest",
    "Monitor",
    "PrometheusCollector",
    "Share",
    "Snapshot",
    "merged",
    "observe",
    "prometheus_text",
]
