"""CSV files of dataclass rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from trueup_lab.evaluation import EvaluationRow
from trueup_lab.performance import TimingRow
from trueup_lab.tables import append_rows, as_text, number, read_table, start_table, write_table

RESULTS = Path(__file__).parents[2] / "results"


@dataclass(frozen=True)
class Sample:
    name: str
    count: int
    share: float | None = number(".2f")
    flag: bool = False


ROWS = [Sample('a, "b"', 3, 0.125, True), Sample("c", -1, None)]


def test_rows_survive_the_file_in_their_formats(tmp_path):
    write_table(tmp_path / "t.csv", Sample, ROWS)
    assert (tmp_path / "t.csv").read_text() == 'name,count,share,flag\n"a, ""b""",3,0.12,True\nc,-1,,False\n'
    assert read_table(tmp_path / "t.csv", Sample) == [Sample('a, "b"', 3, 0.12, True), ROWS[1]]
    assert read_table(tmp_path / "missing.csv", Sample) == []


def test_a_table_is_started_once_and_appended_to(tmp_path):
    path = tmp_path / "new" / "t.csv"
    assert start_table(path, Sample) == []
    append_rows(path, ROWS[1:])
    assert start_table(path, Sample) == ROWS[1:]
    append_rows(path, ROWS[1:])
    assert read_table(path, Sample) == ROWS[1:] * 2


def test_appending_needs_a_started_table(tmp_path):
    with pytest.raises(FileNotFoundError):
        append_rows(tmp_path / "t.csv", ROWS)


def test_a_line_that_was_cut_short_is_skipped_and_then_removed(tmp_path):
    path = tmp_path / "t.csv"
    write_table(path, Sample, ROWS)
    whole = path.read_text()
    path.write_text(whole + "d,4")
    assert len(read_table(path, Sample)) == 2
    start_table(path, Sample)
    assert path.read_text() == whole


def test_other_columns_are_refused_and_the_file_is_left_alone(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,")
    with pytest.raises(ValueError, match="does not hold rows of Sample: its columns are a, b, expected name, count"):
        start_table(path, Sample)
    assert path.read_text() == "a,b\n1,"


@pytest.mark.parametrize(
    ("pattern", "kind"), [("*-c.csv", EvaluationRow), ("rivals.csv", EvaluationRow), ("performance_*.csv", TimingRow)]
)
def test_committed_results_are_read_and_would_be_written_as_they_are(pattern, kind):
    paths = list(RESULTS.glob(pattern))
    assert paths
    for path in paths:
        lines = path.read_text().split("\n", 1)[1]
        assert as_text(read_table(path, kind)) == lines
