"""`trueup demo`: it runs without a download, reports true numbers, and refuses nonsense."""

from __future__ import annotations

import matplotlib.image
import pytest
import torch

import trueup
from trueup_lab import demo
from trueup_lab.cli.demo_tables import demo_summary
from trueup_lab.data import digits
from trueup_lab.data.images import NORMALISATION


def test_the_whole_demonstration(call, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup.decide.sample.IMAGES", 60)  # a fifth of the time
    run = call("demo", "--images", "12", "--out", tmp_path / "pictures")
    assert run.exit_code == 0, run.output
    for name in demo.CORRUPTIONS:
        assert name.replace("_", " ") in run.output
    assert "evidence: better in" in run.output
    assert run.output.rstrip().rsplit("Open ", 1)[1].split()[0].endswith("demo.png")
    rows = (tmp_path / "pictures" / "demo.csv").read_text().splitlines()
    assert rows[0] == "corruption,severity,images,as_trained,correction,evidence"
    assert len(rows) == 2 + len(demo.CORRUPTIONS) * len(demo.SEVERITIES)
    picture = matplotlib.image.imread(tmp_path / "pictures" / "demo.png")
    assert picture.shape[0] > 400
    assert picture[..., :3].std() > 0.05  # not blank


def test_accuracies_are_those_of_the_model():
    model, test = demo.load(), digits.load("test")
    with torch.inference_mode():
        wanted = (model(NORMALISATION["digits"](test.images)).argmax(1) == test.labels).float().mean().item()
    assert demo.accuracy(model, test) == pytest.approx(100 * wanted)
    assert wanted > 0.98


def row(corruption, severity, *accuracies):
    return demo.DemoRow(corruption, severity, dict(zip((demo.PLAIN, *demo.RULES), accuracies, strict=True)))


def test_rows_that_lose_are_counted_and_means_are_means():
    rows = [row("clean", 0, 90.0, 89.0, 90.0), row("fog", 1, 50.0, 60.0, 70.0), row("fog", 3, 40.0, 30.0, 40.0)]
    ms = {demo.PLAIN: 1.0, "correction": 1.5, "evidence": 5.0}
    result = demo.Result((*rows, row("shear", 1, 70.0, 64.0, 72.0)), {}, 100, 3.0, ms)
    assert result.mean().accuracy[demo.PLAIN] == pytest.approx(160 / 3)
    assert result.mean(corruption="fog").gain("correction") == 0
    assert result.mean(severity=1).accuracy["correction"] == 62
    assert result.mean(severity=1).gain("evidence") == 11
    correction, evidence, last = demo_summary(result)
    assert correction.startswith("correction: better in 1 of 3 sets, worse in 2; -2.0 points")
    assert "-1.0 on clean images; 1.5 times the time" in correction
    assert evidence.startswith("evidence: better in 2 of 3 sets, worse in 0; +7.3 points")
    assert "+0.0 on clean images; 5 times the time" in evidence
    assert "One image is 1.0 points" in last


def test_the_settings_are_those_of_the_papers_rule(call, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(demo, "run", lambda _model, correction, **_: seen.append(correction) or 1 / 0)
    call("demo", "--lambda1", "0.5", "--location", "match", "--out", tmp_path)
    call("demo", "--out", tmp_path)
    paper = demo.PAPERS_MNIST
    assert seen == [trueup.Correction(0.5, paper.lambda2, paper.iterations, "match"), paper]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--lambda1", "2"], "lambda1=2.0"), (["--location", "move"], "keep, match"), (["--images", "0"], "--images")],
)
def test_nonsense_is_refused(call, arguments, message):
    run = call("demo", *arguments)
    assert run.exit_code == 2
    assert message in run.output


@pytest.mark.slow
def test_retraining_gives_a_model_as_good():
    assert demo.accuracy(demo.retrain(), digits.load("test")) > 98
