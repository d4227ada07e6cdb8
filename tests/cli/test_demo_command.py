"""`trueup demo`: it runs on what is installed, tells the truth, and says no to nonsense."""

from __future__ import annotations

import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner

from trueup import demo
from trueup.cli import app
from trueup.cli.demo import _summary
from trueup.data import digits
from trueup.data.images import NORMALISATION


def test_the_whole_demonstration(tmp_path):
    run = CliRunner().invoke(app, ["demo", "--images", "12", "--out", str(tmp_path / "pictures")])
    assert run.exit_code == 0, run.output
    for name in demo.CORRUPTIONS:
        assert name.replace("_", " ") in run.output
    assert "ms an image" in run.output
    rows = (tmp_path / "pictures" / "demo.csv").read_text().splitlines()
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


def test_rows_that_lose_are_counted_and_means_are_means():
    rows = [demo.Row("clean", 0, 90.0, 89.0), demo.Row("fog", 1, 50.0, 60.0), demo.Row("fog", 3, 40.0, 30.0)]
    result = demo.Result((*rows, demo.Row("shear", 1, 70.0, 64.0)), {}, 100, 3.0, 1.0, 5.0)
    assert result.mean().plain == pytest.approx(160 / 3)
    assert result.mean(corruption="fog").gain == 0
    assert result.mean(severity=1).corrected == 62
    sets, mean, time = _summary(result)
    assert "better in 1 of 3, worse in 2" in sets
    assert "-1.0 on clean images" in mean
    assert "5 times" in time


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--lambda1", "2"], "lambda1=2.0"), (["--location", "move"], "keep, match"), (["--images", "0"], "--images")],
)
def test_nonsense_is_refused(arguments, message):
    run = CliRunner().invoke(app, ["demo", *arguments])
    assert run.exit_code == 2
    assert message in run.output


@pytest.mark.slow
def test_retraining_gives_a_model_as_good():
    assert demo.accuracy(demo.retrain(), digits.load("test")) > 98
