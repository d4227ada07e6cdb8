"""Results of segmentation from several runs go into one folder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trueup_lab.evaluation import SegmentationRow
from trueup_lab.evaluation.per_image import write_counts
from trueup_lab.experiments.segmentation import SummaryRow, publish
from trueup_lab.tables import read_table, write_table


def row(method: str, set_aside: int, score: float) -> SegmentationRow:
    named = {"model": "espnet", "seed": 0, "method": method, "stream": "any", "batch": 0}
    where = {"corruption": "identity", "severity": 0, "images": 4, "set_aside": set_aside, "calibrated": 0}
    made = {"data": "clean", "data_seed": 0, "needs": "nothing", "checkpoint": "0", "trueup": "0", "torch": "0"}
    results = {"accuracy": 90.0, "calibration_error": 1.0, "ms": 1.0, "device": "cpu", "mean_iou": score, "iou": ""}
    return SegmentationRow(**named, **where, **made, **results, rule="")


@pytest.fixture
def run(tmp_path):
    """Publish the rows of a run, with counts that give their scores."""

    def one(folder: str, *rows: SegmentationRow):
        path = tmp_path / folder / "camvid-c.csv"
        write_table(path, SegmentationRow, rows)
        for each in rows:
            union = torch.full((4, 11), 1000, dtype=torch.int32)
            write_counts(path, each, {"intersection": (10 * each.mean_iou * torch.ones(4, 11)).int(), "union": union})
        publish(path, tmp_path / "results", "camvid")
        return (
            read_table(tmp_path / "results" / "camvid-c.csv", SegmentationRow),
            read_table(tmp_path / "results" / "summary.csv", SummaryRow),
        )

    return one


def test_a_run_of_another_kind_leaves_the_rows_of_the_first(run):
    first = [row("uncorrected", 3, 50.0), row("default", 3, 60.0)]
    _, summary = run("first", *first)
    second = [row("uncorrected", 0, 55.0), row("default", 0, 57.0)]
    rows, both = run("second", *second)
    assert rows == [*first, *second]
    assert both[: len(summary)] == summary
    gains = {r.set_aside: r.gain for r in both if (r.method, r.kind) == ("default", "all")}
    assert gains == pytest.approx({3: 10.0, 0: 2.0})


def test_measuring_again_replaces_in_place(run):
    run("first", row("uncorrected", 3, 50.0), row("default", 3, 60.0))
    rows, summary = run("again", row("uncorrected", 3, 50.0), replace(row("default", 3, 62.0), images=4, trueup="1"))
    assert [(r.method, r.mean_iou) for r in rows] == [("uncorrected", 50.0), ("default", 62.0)]
    assert [r.gain for r in summary if (r.method, r.kind) == ("default", "all")] == pytest.approx([12.0])
