"""Exporters, read by the libraries they are for: Prometheus, OpenTelemetry, CSV and Parquet."""

from __future__ import annotations

import csv
import math
import threading
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

import trueup
from architectures import images, make
from trueup.monitor import CONTENT_TYPE, P_EDGES, PrometheusCollector, Snapshot, observe, prometheus_text


@pytest.fixture(scope="module")
def watched():
    """A monitor that has seen 40 images, of which 10 are noise."""
    model = make("mobilenet")
    targets = trueup.calibrate(model, images(400).split(100), decide=False)
    robust = trueup.correct(model, targets, trueup.Evidence(), report=True)
    monitor = trueup.Monitor(robust, clock=lambda: 1_700_000_000.0)
    with torch.inference_mode():
        monitor.update(robust(images(30, seed=3))[1], changed=[False] * 29 + [True])
        monitor.update(robust(torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0)))[1])
    return monitor


@contextmanager
def serving(text):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def scraped(url):
    """The samples that Prometheus's own parser finds, by name and labels."""
    parser = pytest.importorskip("prometheus_client.parser")
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    families = list(parser.text_string_to_metric_families(text))
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def check(found, snapshot):
    assert found["trueup_images_total",] == 40
    assert found["trueup_unusual_images_total",] == snapshot.unusual_images >= 10
    assert found["trueup_compared_images_total",] == 30
    assert found["trueup_changed_answers_total",] == 1
    assert found["trueup_p_value_bucket", ("le", "0.01")] == sum(snapshot.histogram[:2])
    assert found["trueup_p_value_bucket", ("le", "+Inf")] == found["trueup_p_value_count",] == 40
    assert found["trueup_drifted",] == 1
    assert found["trueup_drift_since_timestamp_seconds",] == 1_700_000_000
    for name, mean in snapshot.evidence.items():
        total, count = (found[f"trueup_evidence_{part}", ("norm", name)] for part in ("sum", "count"))
        assert total / count == pytest.approx(mean)
    assert found["trueup_drift_log10_e_value",] == pytest.approx(snapshot.log_e_value / math.log(10))


def test_prometheus_scrapes_the_text(watched):
    with serving(lambda: prometheus_text(watched.snapshot())) as url:
        check(scraped(url), watched.snapshot())


def test_prometheus_scrapes_the_collector_through_its_own_server(watched):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(PrometheusCollector(watched.snapshot))
    server, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        check(scraped(f"http://127.0.0.1:{server.server_port}/metrics"), watched.snapshot())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def two_models():
    return {"first": Snapshot(("a",), 0.01, images=3), 'sec"ond': Snapshot(("b", "c"), 0.05, images=4)}


def test_several_models_are_told_apart_in_prometheus(watched):
    client = pytest.importorskip("prometheus_client")
    models = {name: lambda snapshot=snapshot: snapshot for name, snapshot in two_models().items()}
    registry = client.CollectorRegistry(auto_describe=True)  # as the default registry is
    registry.register(PrometheusCollector(models))
    for text in (prometheus_text(two_models()), client.generate_latest(registry).decode()):
        with serving(lambda text=text: text) as url:
            found = scraped(url)
        assert found["trueup_images_total", ("model", "first")] == 3
        assert found["trueup_images_total", ("model", 'sec"ond')] == 4
        assert found["trueup_evidence_count", ("model", 'sec"ond'), ("norm", "c")] == 0
        assert found["trueup_p_value_bucket", ("le", "0.01"), ("model", "first")] == 0
        types = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types))  # a second one would be an error
        assert text.count("# HELP trueup_unusual_images_total ") == 1
    models["third"] = watched.snapshot
    assert registry.get_sample_value("trueup_images_total", {"model": "third"}) == 40
    assert prometheus_text({}).count("# TYPE") == len(types)


def test_several_models_are_told_apart_in_opentelemetry():
    models = {name: lambda snapshot=snapshot: snapshot for name, snapshot in two_models().items()}
    with collecting(models) as collect:
        found = collect()
        assert found["trueup.images", ("model", "first")] == 3
        assert found["trueup.evidence.count", ("model", 'sec"ond'), ("norm", "c")] == 0
        models["third"] = models["first"]
        assert collect()["trueup.images", ("model", "third")] == 3


def test_names_of_norms_are_escaped():
    text = prometheus_text(Snapshot(('a"b\\c\n',), 0.01))
    assert r'trueup_evidence_sum{norm="a\"b\\c\n"} 0' in text


@contextmanager
def collecting(snapshot):
    """A function that collects what OpenTelemetry reads, by name and attributes."""
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    observe(provider.get_meter("test"), snapshot)

    def collect():
        (resource,) = reader.get_metrics_data().resource_metrics
        return {
            (metric.name, *sorted(point.attributes.items())): point.value
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }

    try:
        yield collect
    finally:
        provider.shutdown()


def test_opentelemetry_reads_the_same_numbers(watched):
    with collecting(watched.snapshot) as collect:
        found = collect()
    snapshot = watched.snapshot()
    assert found["trueup.images",] == 40
    assert found["trueup.drifted",] == 1
    assert found["trueup.evidence.sum", ("norm", "stem.1")] == pytest.approx(snapshot.evidence_sum[0])
    assert found["trueup.p_value.bucket", ("le", f"{P_EDGES[1]:g}")] == sum(snapshot.histogram[:2])


def test_opentelemetry_gets_no_time_of_drift_before_an_alarm_and_does_not_complain(caplog):
    with collecting(lambda: Snapshot(("a",), 0.01, images=3)) as collect:
        found = collect()
    assert found["trueup.images",] == 3
    assert found["trueup.drifted",] == 0
    assert not any(name.startswith("trueup.drift_since") for name, *_ in found)
    assert caplog.records == []


def test_one_collection_of_opentelemetry_is_one_snapshot():
    """Images that arrive during a collection must not be in some of its numbers only."""
    images = iter(range(1, 1000))

    def snapshot():
        count = next(images)
        return Snapshot(("a",), 0.01, images=count, unusual_images=count, compared=count)

    with collecting(snapshot) as collect:
        for _ in range(3):
            before = next(images)
            found = collect()
            names = ("images", "unusual_images", "compared_images", "gate.count")
            assert {found[f"trueup.{name}",] for name in names} == {before + 1}


def rows_of(path, **options):
    model = make("mobilenet")
    targets = trueup.calibrate(model, images(300).split(100), decide=False)
    robust = trueup.correct(model, targets, trueup.Evidence(), report=True)
    x = images(5, seed=3)
    x[1] = torch.nan
    with trueup.Monitor(robust, rows=path, clock=lambda: 1_700_000_000.25, **options) as monitor:
        with torch.inference_mode():
            report = robust(x)[1]
        monitor.update({key: value[:3] for key, value in report.items()}, changed=[True, False, False])
        monitor.update({key: value[3:] for key, value in report.items()})
    return report, monitor


def test_rows_as_csv(tmp_path):
    report, monitor = rows_of(tmp_path / "rows.csv")
    rows_of(tmp_path / "rows.csv")  # goes on
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert list(rows[0]) == ["timestamp", "p", "gate", "changed", *(f"evidence.{name}" for name in monitor.norms)]
    assert [row["changed"] for row in rows[:5]] == ["1", "0", "0", "", ""]
    assert rows[0]["timestamp"] == "2023-11-14T22:13:20.250+00:00"
    assert [float(row["p"]) for row in rows[:5]] == pytest.approx(report["p"].tolist(), rel=1e-5)
    assert rows[1]["evidence.stem.1"] == ""
    assert float(rows[0]["evidence.stem.1"]) == pytest.approx(report["evidence"][0, 0].item(), rel=1e-5)


def test_rows_as_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    report, _ = rows_of(tmp_path / "rows.parquet")
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.column("p").to_pylist() == pytest.approx(report["p"].tolist())
    assert table.column("changed").to_pylist() == [True, False, False, None, None]
    assert table.column("evidence.stem.1").to_pylist()[1] is None
    assert table.column("timestamp").to_pylist()[0].timestamp() == 1_700_000_000.25


def test_a_file_with_other_columns_is_not_continued(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has the columns"):
        rows_of(tmp_path / "rows.csv")
    with pytest.raises(ValueError, match="ends in .csv or .parquet"):
        rows_of(tmp_path / "rows.txt")
