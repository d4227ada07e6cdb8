"""The examples run: a FastAPI endpoint with the monitor behind /metrics, and a batch job, against 127.0.0.1."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import trueup
from architectures import images, make
from trueup.monitor import Alarm, Drift, Snapshot

EXAMPLES = Path(__file__).parents[2] / "examples"
RULE = "ignore:correct. these targets carry no decision:UserWarning"
pytestmark = pytest.mark.filterwarnings(RULE)


@pytest.fixture(scope="module")
def calibrated():
    model = make("mobilenet")
    return model, trueup.calibrate(model, images(300).split(100), decide=False)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def noisy(count):
    return images(count, seed=4) + torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def ask(url, body=None):
    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=20) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def file_of(image):
    buffer = io.BytesIO()
    np.save(buffer, image.numpy())
    return buffer.getvalue()


@contextmanager
def serving(app):
    """Address of an application's server, in a thread."""
    uvicorn = pytest.importorskip("uvicorn")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def served(calibrated, example, tmp_path):
    """Address of the example's server; the folder in which workers share their snapshots."""
    pytest.importorskip("fastapi")
    (tmp_path / "workers").mkdir()
    app = example("serve_fastapi").make_app(*calibrated, folder=tmp_path / "workers")
    with serving(app) as url:
        yield url, tmp_path / "workers"


def test_the_endpoint_answers_and_its_monitor_is_scraped(calibrated, served):
    url, workers = served
    model, targets = calibrated
    robust = trueup.correct(model, targets)
    clean, strange = images(6, seed=3), noisy(6)
    for image in clean:
        found = json.loads(ask(f"{url}/answer", file_of(image))[0])
        assert found["class"] == int(robust(image[None]).argmax())
        assert 0 < found["p"] <= 1
    text, kind = ask(f"{url}/metrics")
    assert kind.startswith("text/plain; version=0.0.4")
    assert "trueup_images_total 6\n" in text
    assert "trueup_drifted 0\n" in text
    for image in strange:
        ask(f"{url}/answer", file_of(image))
    assert "trueup_images_total 12\n" in ask(f"{url}/metrics")[0]
    drift = json.loads(ask(f"{url}/drift")[0])
    assert drift["drifted"]
    assert drift["false_alarm_probability"] < 0.001
    # Another worker's images are in the sum.
    Snapshot(("stem.1",), 0.01, images=100).save(workers / "other.json")
    assert "trueup_images_total 112\n" in ask(f"{url}/metrics")[0]


def test_workers_with_the_same_process_number_are_told_apart_and_count_on_after_their_end(
    calibrated, example, tmp_path
):
    """As process 1 of two containers, or one after the other. Counters must not fall when a worker ends."""
    pytest.importorskip("fastapi")
    make_app = example("serve_fastapi").make_app
    with serving(make_app(*calibrated, folder=tmp_path)) as first:
        with serving(make_app(*calibrated, folder=tmp_path)) as second:
            ask(f"{first}/answer", file_of(images(1)[0]))
            ask(f"{second}/answer", file_of(images(1)[0]))
            ask(f"{second}/metrics")
            assert "trueup_images_total 2\n" in ask(f"{first}/metrics")[0]
            ask(f"{second}/answer", file_of(images(1)[0]))
        assert "trueup_images_total 3\n" in ask(f"{first}/metrics")[0]
    assert len(list(tmp_path.iterdir())) == 2


def test_several_processes_serve_one_sum_and_know_nothing_of_earlier_runs(calibrated, tmp_path):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    _, targets = calibrated
    targets.save(tmp_path / "t.trueup")
    (tmp_path / "served_models.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from architectures import make\ndef load():\n    return make('mobilenet')\n"
    )
    left = tmp_path / "temporary" / "trueup-left" / "4711.json"
    alarm = Drift(9, 99.0, 99.0, 0.001, Alarm(1.0, 1.0, 9))
    Snapshot(("stem.1",), 0.01, images=9, streams={"4711": alarm}).save(left)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, EXAMPLES / "serve_fastapi.py", "served_models:load", "t.trueup", "--workers", "2"]
    environment = {**os.environ, "TMPDIR": str(left.parents[1]), "PYTHONWARNINGS": "ignore"}
    server = subprocess.Popen([*command, "--port", str(port)], cwd=tmp_path, env=environment)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120

    def text_once(condition):
        """The metrics, as soon as they fulfil a condition; whatever they are at the end."""
        text = ""
        while time.monotonic() < deadline and server.poll() is None and not (text and condition(text)):
            time.sleep(0.2)
            with suppress(OSError):  # not started yet
                text = ask(f"{url}/metrics")[0]
        return text

    try:
        text = text_once(lambda _: True)
        assert "trueup_images_total 0\n" in text
        assert "trueup_drifted 0\n" in text
        for image in images(12):
            ask(f"{url}/answer", file_of(image))
        assert "trueup_images_total 12\n" in text_once(lambda text: "trueup_images_total 12\n" in text)
    finally:
        server.terminate()
        server.wait(60)
    assert list(left.parents[1].iterdir()) == [left.parent]


@pytest.mark.parametrize("body", [b"", b"no array", file_of(torch.zeros(2, 2))])
def test_a_bad_request_gets_a_sentence(served, body):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(f"{served[0]}/answer", body)
    assert caught.value.code == 422
    assert "not an input of this model" in caught.value.read().decode()
    caught.value.close()


def test_the_batch_job_answers_and_its_drift_test_goes_on(calibrated, example, tmp_path, monkeypatch, capsys):
    model, targets = calibrated
    targets.save(tmp_path / "t.trueup")
    (tmp_path / "job_models.py").write_text(
        "from architectures import make\ndef load():\n    return make('mobilenet')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monday, tuesday = images(40, seed=3), noisy(20)
    for name, some in (("monday", monday), ("tuesday", tuesday)):
        np.save(tmp_path / f"{name}.npy", some.numpy())

    def run(day):
        out = tmp_path / "runs" / day
        status = example("batch_job").main(
            ["job_models:load", str(tmp_path / "t.trueup"), str(tmp_path / f"{day}.npy"), "--out", str(out)]
        )
        rows = list(csv.DictReader(io.StringIO((out / "answers.csv").read_text())))
        return status, rows, Snapshot.load(out / "snapshot.json")

    status, answers, seen = run("monday")
    assert (status, len(answers), seen.images) == (0, 40, 40)
    expected = trueup.correct(model, targets)(monday).argmax(dim=1).tolist()
    assert [int(row["answer"]) for row in answers] == expected
    assert answers[7]["image"] == "monday.npy[7]"
    status, _, later = run("tuesday")
    assert (status, later.images) == (3, 20)
    assert later.streams.keys() == seen.streams.keys()
    (drift,) = later.streams.values()
    assert drift.images == 60
    assert "inputs have drifted since" in capsys.readouterr().out
    assert len((tmp_path / "runs" / "tuesday" / "rows.csv").read_text().splitlines()) == 21
    # After a new calibration the drift test cannot go on, and the old state must not be lost.
    trueup.calibrate(model, images(220).split(110), decide=False).save(tmp_path / "t.trueup")
    with pytest.raises(SystemExit) as stopped:
        run("tuesday")
    assert stopped.value.code == 2
    assert "monitor.json: its images were ranked among the 150 held-out images" in capsys.readouterr().err
