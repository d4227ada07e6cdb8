"""A short form of `make test-faults`: some kills, two processes at once, and a few damaged files of every kind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trueup_lab.tables import read_table

ROOT = Path(__file__).resolve().parents[2]
FEW = (
    "then the same: data (make cifar10-c|get)|another: data make imagenet-c, seed 0|"
    "two at once: data make cifar10-c, seed 0$|damaged file"
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="commands run in forked processes")
def test_no_fault_goes_unnoticed(tmp_path):
    command = ["--rounds", "1", "--mutations", "40", "--only", FEW, "--out", str(tmp_path / "faults.csv")]
    sources = os.pathsep.join(str(ROOT / part) for part in ("src", "lab/src"))
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "faults.py", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": sources},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    tried = re.search(r"^all +(\d+)", run.stdout, re.MULTILINE)
    assert tried is not None
    assert int(tried[1]) > 280


def test_the_committed_table_has_every_fault_and_nothing_silent(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import faults

    sys.modules.pop("faults")
    rows = read_table(ROOT / "results" / "faults.csv", faults.FaultRow)
    assert {row.fault for row in rows} >= {"kill, then the same", "kill, then another", "two at once", "full disk"}
    assert all(row.tried >= 2000 for row in rows if row.fault == "damaged file")
    assert sum(row.tried for row in rows if row.fault == "damaged file") >= 14_000
    assert [row for row in rows if row.silent or row.unexplained or not row.tried] == []
