"""`trueup evaluate` and `trueup reproduce`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import matplotlib.image
import pytest

from trueup_lab.evaluation import read_rows
from trueup_lab.models import zoo

SMALL = ["--images", "12", "--calibrate", "60", "--corruption", "fog", "--corruption", "identity"]


def test_rows_are_made_shown_and_not_made_again(call, tmp_path):
    where = ("--out", tmp_path / "rows.csv", "--targets", tmp_path)
    run = call("evaluate", "resnet20-bn-digits", *SMALL, *where)
    assert run.exit_code == 0, run.output
    assert "bn-batch" in run.output
    assert "default" in run.output
    assert "needs" in run.output
    before = (tmp_path / "rows.csv").read_text()
    assert len(read_rows(tmp_path / "rows.csv")) == 12  # six methods on two sets
    assert call("evaluate", "resnet20-bn-digits", *SMALL, *where).exit_code == 0
    assert (tmp_path / "rows.csv").read_text() == before


def test_a_time_limit_that_has_passed_says_how_to_go_on(call, tmp_path):
    where = ("--out", tmp_path / "rows.csv", "--targets", tmp_path, "--time-limit", "0")
    run = call("evaluate", "resnet20-bn-digits", *SMALL, "--method", "uncorrected", *where)
    assert run.exit_code == 0, run.output
    assert "run the same command again to continue" in run.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.safetensors"], "neither a file nor a model"),
        (["resnet20-bn-digits", "--method", "magic"], "no method 'magic'"),
        (["resnet20-bn-digits", "--stream", "loud"], "unknown stream 'loud'"),
        (["resnet20-bn-digits", "--corruption", "smog"], "'smog' is not a corruption"),
        (["resnet20-bn-digits", "--seeds", "7"], "has no seed 7"),
    ],
)
def test_nonsense_is_refused(call, tmp_path, arguments, message):
    run = call("evaluate", *arguments, "--out", tmp_path / "rows.csv")
    assert run.exit_code == 2
    assert message in run.output


def test_the_example_of_a_method_of_ones_own_runs_by_its_name(call, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    where = ("--out", tmp_path / "rows.csv", "--targets", tmp_path)
    names = ("--method", "own_method:jittered", "--method", "own_method:TEMPERATURE")
    run = call("evaluate", "resnet20-bn-digits", *SMALL, *names, *where)
    assert run.exit_code == 0, run.output
    rows = read_rows(tmp_path / "rows.csv")
    assert {row.method for row in rows} == {"jittered", "temperature 2"}
    sys.modules.pop("own_method")


def test_every_experiment_is_listed_with_what_it_lacks(call, tmp_path):
    run = call("reproduce", "--list", "--results", tmp_path, "--data", tmp_path)
    assert run.exit_code == 0, run.output
    assert all(f"{kind} " in run.output for kind in ("table1", "table6", "figure1", "figure8", "rivals"))
    assert "resnet20-gn-mnist" in run.output
    assert "trueup train --set mnist --norm gn" in run.output.replace("\n", " ").replace("  ", " ")


@pytest.mark.data
def test_a_table_a_figure_and_the_report_from_a_few_images(call, tmp_path, data_path):
    root = data_path("MNIST", "raw").parents[1]
    (tmp_path / "results" / "models").mkdir(parents=True)
    shutil.copy(zoo.FOLDER / "resnet20-bn-mnist.safetensors", tmp_path / "results" / "models")
    places = ("--results", tmp_path / "results", "--targets", tmp_path, "--data", root)
    few = ("--images", "10", "--calibrate", "20")
    document = ("--report", "--document", tmp_path / "docs" / "reproduction.md")
    run = call("reproduce", "table1", "figure2", *few, *places, *document)
    assert run.exit_code == 0, run.output
    text = (tmp_path / "docs" / "reproduction.md").read_text()
    assert "| identity |" in text
    assert "99.54" in text
    assert matplotlib.image.imread(tmp_path / "results" / "figures" / "figure2.png")[..., :3].std() > 0.05


def test_an_unknown_experiment_is_refused(call, tmp_path):
    run = call("reproduce", "table9", "--results", tmp_path)
    assert run.exit_code == 2
    assert "unknown experiment 'table9'" in run.output
