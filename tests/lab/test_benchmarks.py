"""The scripts in benchmarks/ share functions; each still finds what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_script_can_be_imported():
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import {', '.join(names)}"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
