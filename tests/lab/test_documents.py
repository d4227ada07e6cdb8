"""Documents say what the files say: tables are those of the CSVs, and links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


@pytest.fixture
def bench_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_table

    yield bench_table
    sys.modules.pop("bench_table")


def test_the_tables_of_the_bench_are_those_of_its_file(bench_table):
    for path, tables in bench_table.documents().items():
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            assert f"<!-- {name} -->\n{table}<!-- /{name} -->" in text, f"{path.name}: run benchmarks/bench_table.py"


def test_the_tables_of_performance_are_those_of_its_files(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import performance_table

    text = performance_table.DOCUMENT.read_text(encoding="utf-8")
    for name, table in performance_table.tables().items():
        assert f"<!-- {name} -->\n{table}<!-- /{name} -->" in text, "run benchmarks/performance_table.py"
    sys.modules.pop("performance_table")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert broken == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
