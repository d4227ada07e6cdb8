"""The page on deployment shows what its files hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_files():
    found = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "deployment_table.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
