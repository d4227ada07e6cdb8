"""The benchmark of training measures what it says, at the smallest size."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "training_speed.py"


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_it_writes_a_row_for_every_norm_and_variant_and_survives_one_that_fails(tmp_path, monkeypatch, capsys):
    small = ("--device", "cpu", "--models", "1", "--batch", "4", "--steps", "1", "--images", "8")
    out = tmp_path / "results" / "speed.csv"
    call(
        monkeypatch,
        *(*small, "--norm", "bn", "--norm", "frn", "--variant", "none", "--out", str(out)),
    )
    call(monkeypatch, *small, "--norm", "ln", "--norm", "gn", "--variant", "none", "--out", str(out))
    assert "unknown norm 'ln'" in capsys.readouterr().out
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["norm"] for row in rows] == ["bn", "frn", "gn"]
    assert all(float(row["ms_a_model_and_step"]) > 0 for row in rows)
