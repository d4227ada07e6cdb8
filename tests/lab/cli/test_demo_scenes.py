"""`trueup demo --task segmentation`: it runs without a download, and the default helps in every weather."""

from __future__ import annotations

from functools import partial

import matplotlib.image
import numpy as np
import pytest

import trueup
from trueup_lab.data.scenes import WEATHERS
from trueup_lab.demo import scenes as demo
from trueup_lab.tables import read_table


@pytest.mark.parametrize("decide", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_whole_demonstration(call, tmp_path, monkeypatch, decide):
    """The decision takes most of the time: without it, the setting that it takes is given."""
    chosen = trueup.Evidence(budget=1.0, strength=0.1, base=0.0)
    if not decide:
        calibrate = partial(trueup.calibrate, decide=False)
        monkeypatch.setattr(demo.trueup, "calibrate", lambda *a, **k: calibrate(*a, **k))
        correct = trueup.correct
        monkeypatch.setattr(demo.trueup, "correct", lambda model, targets: correct(model, targets, chosen))
        monkeypatch.setattr(demo, "CALIBRATION", 24)
    monkeypatch.setattr(demo, "SEVERITIES", (3,))
    run = call("demo", "--task", "segmentation", "--images", "6", "--out", tmp_path / "pictures")
    assert run.exit_code == 0, run.output
    assert "with trueup" in run.output
    assert "Targets(" in run.output
    assert "shares of pixels" in run.output
    assert run.output.rstrip().rsplit("Open ", 1)[1].split()[0].endswith("segmentation.png")
    assert ("chosen among" in run.output) == decide
    rows = read_table(tmp_path / "pictures" / "segmentation.csv", demo.ScenesRow)
    assert [row.weather for row in rows] == ["clean", *WEATHERS]
    clean, *others = rows
    assert clean.as_trained > 80
    assert clean.gain > -1
    by = {row.weather: row for row in others}
    for weather in ("fog", "dusk", "rain"):
        assert by[weather].as_trained < clean.as_trained - 15
        assert by[weather].gain > 10
    assert by["noise"].gain > -1
    assert len(clean.corrected_by_class.split("/")) == 8
    picture = matplotlib.image.imread(tmp_path / "pictures" / "segmentation.png")
    assert picture[..., :3].std() > 0.1


def test_counts_of_a_scene_are_by_pixel():
    (scene,) = [demo.draw_street(3)]
    right = np.asarray(scene.mask)[None].astype(np.int64)
    counts = demo.count(demo.torch.from_numpy(right), [scene])
    assert counts.columns(slice(None))["mean_iou"] == pytest.approx(100)


def test_an_unknown_task_is_refused(call):
    run = call("demo", "--task", "detection")
    assert run.exit_code == 2
    assert "classification or segmentation" in run.output
