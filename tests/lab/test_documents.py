"""Documents say what the files say: tables are those of the CSVs, and links lead somewhere."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from trueup_lab.experiments.document import report
from trueup_lab.tables import read_table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("maker", ["bench_table", "document_numbers"])
def test_numbers_in_documents_are_those_of_the_files_they_name(monkeypatch, maker):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module(maker)
    sys.modules.pop(maker)
    for path, blocks in module.documents().items():
        text = path.read_text(encoding="utf-8")
        for name, block in blocks.items():
            assert f"<!-- {name} -->\n{block}<!-- /{name} -->" in text, f"{path.name}: run benchmarks/{maker}.py"


def test_numbers_in_prose_are_those_of_the_files_and_all_are_accounted_for(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import page_numbers

    assert page_numbers.faults() == []
    for path in DOCUMENTS:
        # A line that begins with a comment is HTML to the end: its text would not be formatted.
        assert re.findall(r"^ *<!-- [^>]* -->[^\n]+$", path.read_text(encoding="utf-8"), re.MULTILINE) == [], path.name
    text = "Gains 1.5 points\nand costs 2 %.\n<!-- history -->\n| 3.5 |\n<!-- /history -->\n`4.5`, version 0.1"
    assert page_numbers.unaccounted(text, []) == ["line 1: 1.5", "line 2: 2"]
    assert page_numbers.unaccounted(text, ["1.5 points and costs 2 %"]) == []
    assert page_numbers.missing(text, ["1.5 points and", "2.5 points"]) == ["2.5 points"]
    for name in ("page_numbers", "page_claims", "page_tables"):
        sys.modules.pop(name)


def test_the_table_of_fidelity_is_that_of_its_file(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import corruption_fidelity

    sys.modules.pop("corruption_fidelity")
    rows = read_table(ROOT / "results" / "corruption_fidelity.csv", corruption_fidelity.FidelityRow)
    text = (ROOT / "docs" / "corruptions.md").read_text(encoding="utf-8")
    assert f"{corruption_fidelity.START}\n{corruption_fidelity.table(rows)}\n{corruption_fidelity.END}" in text


def test_the_report_on_the_paper_is_that_of_the_results(tmp_path):
    """Apart from the models that are missing here."""

    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if line and not line.startswith("Missing models:")]

    assert lines(report(ROOT / "results", tmp_path)) == lines((ROOT / "docs" / "reproduction.md").read_text("utf-8"))


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
